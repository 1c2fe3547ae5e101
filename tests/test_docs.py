"""The documentation: every public name has an example, and examples are Python that runs."""

import ast
import doctest
import importlib.util
import re
import subprocess
import sys

import oldest
import pytest
import warm
from paths import REPOSITORY, SUPPORT
from ranks import clean_environ, lacking

PAGES = {name: REPOSITORY / "docs" / "reference" / f"{name}.md" for name in ("torch", "lightning", "keras")}
KINDS = {"torch": "torch", "lightning": "lightning", "keras": "tensorflow"}  # the warm process with the framework
NAMES = {page: re.findall(r"^::: (\S+)$", file.read_text(), re.MULTILINE) for page, file in PAGES.items()}
DOCUMENTS = [
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted((REPOSITORY / "docs").glob("*.md")),
    *(REPOSITORY / folder / "README.md" for folder in ("labs", "slurm")),
]


def docstring(name: str) -> str:
    """Of a public class or function; read from the source, as the page does."""
    module, _, attribute = name.rpartition(".")
    tree = ast.parse((REPOSITORY / f"{module.replace('.', '/')}.py").read_text())
    node = next(node for node in tree.body if getattr(node, "name", None) == attribute)
    return ast.get_docstring(node) or ""


@pytest.mark.parametrize("name", [name for names in NAMES.values() for name in names])
def test_every_public_name_has_an_example_that_compiles(name):
    assert "\nExamples:\n" in docstring(name)
    examples = doctest.DocTestParser().get_examples(docstring(name))
    assert examples
    for example in examples:
        compile(example.source, name, "single")


AS_HOROVODS_DOCUMENTATION_HAS_THEM = {
    "allreduce", "allgather", "broadcast", "reducescatter", "PartialDistributedOptimizer",
    "PartialDistributedGradientTape", "callbacks", "load_model",
}  # fmt: skip


def test_the_reference_shows_all_of_the_packages():
    from hvdtrain.keras import MODULES

    tree = ast.parse((REPOSITORY / "hvdtrain" / "lightning" / "__init__.py").read_text())
    exported = next(
        node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    )
    ours = {name for path, names in MODULES.items() if path.startswith("hvdtrain.") for name in names}
    assert {name.rpartition(".")[2] for name in NAMES["keras"]} == ours - AS_HOROVODS_DOCUMENTATION_HAS_THEM
    assert {name.rpartition(".")[2] for name in NAMES["lightning"]} == set(ast.literal_eval(exported))


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_run_in_one_process(page, tmp_path):
    framework = "tensorflow" if page == "keras" else "torch"
    if lacking(framework) or (page == "lightning" and not importlib.util.find_spec("lightning")):
        pytest.skip(lacking(framework) or "needs Lightning: pip install -e .[lightning]")
    command = warm.command(KINDS[page], SUPPORT / "run_examples.py", *NAMES[page])
    done = subprocess.run(
        command, cwd=tmp_path, env=clean_environ(), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert int(done.stdout.split()[-3]) > len(NAMES[page])


@pytest.mark.only_ci
def test_the_reference_is_what_the_code_says():
    pytest.importorskip("mkdocs", reason="needs mkdocs: pip install -e .[docs]")
    spec = importlib.util.spec_from_file_location("hooks", REPOSITORY / "docs" / "hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    for page, text in hooks.reference().items():
        assert page.read_text() == text, "python docs/hooks.py"


LINK = re.compile(r"\[[^\]]+\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
PAGES_WITH_LINKS = sorted({*DOCUMENTS, *(REPOSITORY / "docs").rglob("*.md"), *(REPOSITORY / "labs").glob("*.md")})


def anchors(page):
    """The anchors of a page's headings, as a forge makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("file", PAGES_WITH_LINKS, ids=lambda file: str(file.relative_to(REPOSITORY)))
def test_links_lead_somewhere_in_a_clone(file):
    """`make docs` checks those of the site."""
    text = re.sub(r"^```.*?^```", "", file.read_text(), flags=re.DOTALL | re.MULTILINE)
    for path, anchor in LINK.findall(text):
        target = (file.parent / path).resolve() if path else file
        assert target.exists(), f"({path}#{anchor})"
        assert not anchor or anchor in anchors(target), f"({path}#{anchor})"


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: str(file.relative_to(REPOSITORY)))
def test_the_pages_programs_compile(file):
    for number, program in enumerate(re.findall(r"^```python\n(.*?)^```", file.read_text(), re.DOTALL | re.MULTILINE)):
        compile(program, f"{file}, program {number}", "exec")


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1], ids=["its own module", "runs that survive"])
def test_the_programs_of_lightnings_page_run_as_they_stand(number, tmp_path):
    if lacking("torch") or not importlib.util.find_spec("lightning") or not importlib.util.find_spec("horovod"):
        pytest.skip("needs Lightning and Horovod: make horovod")
    page = (REPOSITORY / "docs" / "lightning.md").read_text()
    programs = re.findall(r"^```python\n(import torch\n.*?)^```", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "mine.py").write_text(programs[number])
    environ = {**clean_environ(), "HVDTRAIN_REPORT": "off", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "mine.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


FOLDERS = "core|datasets|engines|keras|launch|lightning|run|tensorflow|tools|torch"
PATHS = re.compile(rf"`((?:hvdtrain|tests|labs|slurm|docs|{FOLDERS})/[a-z0-9_./-]+)`")


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: str(file.relative_to(REPOSITORY)))
def test_the_files_that_a_page_names_exist(file):
    made_later = ("name", "labs/work")
    paths = [path for path in PATHS.findall(file.read_text()) if not any(part in path.lower() for part in made_later)]
    assert [path for path in paths if not any((REPOSITORY / top / path).exists() for top in ("", "hvdtrain"))] == []


def test_the_readme_is_short_and_its_pages_exist():
    readme = (REPOSITORY / "README.md").read_text()
    assert len(readme.splitlines()) <= 130
    targets = re.findall(r"\]\(([^)#]+)", readme)
    assert targets
    assert [target for target in targets if not (REPOSITORY / target).exists()] == []


def test_horovods_page_has_the_versions_of_setup_cfg_and_those_tested():
    page = (REPOSITORY / "docs" / "horovod.md").read_text()
    python = re.search(r"^python_requires = >=(.*)$", (REPOSITORY / "setup.cfg").read_text(), re.MULTILINE)
    pins = dict(re.findall(r"^(\w+)==(\d+\.\d+)", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE))
    for title in ("PyTorch", "TensorFlow", "Keras", "Python"):
        works, tested = re.search(rf"^\| {title} \| (\S+) and newer.* \| (.*) \|$", page, re.MULTILINE).groups()
        library = {"PyTorch": "torch"}.get(title, title.lower())
        assert works == (python[1] if title == "Python" else oldest.bounds()[library])
        assert tested.startswith(pins.get(library, ""))


@pytest.mark.parametrize("page", ["keras", "lightning"])
def test_each_section_of_promises_names_its_tests(page):
    _, *sections = re.split("^## ", (REPOSITORY / "docs" / f"{page}.md").read_text(), flags=re.MULTILINE)
    for section in sections:
        _, _, tests = section.partition("<!-- Tests:")
        words = tests.partition("-->")[0].split()
        assert words, section[:60]
        file = ""
        for word in words:
            file = (REPOSITORY / word).read_text() if "/" in word else file
            assert "/" in word or f"def {word}(" in file, word
