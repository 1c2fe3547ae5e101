"""Recipes: the shipped ones, how entries and flags are put together, and the full text of every refusal."""

import os
from pathlib import Path

import pytest
from choices import choice
from refusals import refusal
from ruamel.yaml import YAML
from users import NOBODY, needs_root

import hvdtrain
from hvdtrain.core import compatibility, flags, recipe, user_code
from hvdtrain.core.recipe import Recipe, dump, load, validate
from hvdtrain.core.values import known
from hvdtrain.errors import RecipeError

SHIPPED = Path(hvdtrain.__file__).parent / "recipes"
KEYS = {"name": "mine", "model": "linear", "dataset": "linear", "batch_size": 100, "epochs": 3, "base_lr": 0.5}
BASE = """default:
  model: linear
  dataset: linear
  batch_size: 100
  epochs: 3
  base_lr: 2e-3
"""


FOREIGN = {  # a recipe of another user's: why it is not read
    "extends: linear": "",
    "extends: {folder}/theirs.yaml": "",
    "extends: {folder}/private.yaml": "another user's recipe extends it, which is not theirs",
    "a link": "it is a link, which is not followed",
}


@needs_root
@pytest.mark.parametrize(("keys", "why"), FOREIGN.items(), ids=FOREIGN)
def test_a_recipe_of_another_user_leads_to_no_file_of_ours(tmp_path, keys, why):
    """As with --evaluate RUN: a message would show what is in it."""
    for name, text in (
        ("private", "SECRET"),
        ("theirs", BASE),
        ("run", f"default:\n  {keys.format(folder=tmp_path)}\n"),
    ):
        (tmp_path / f"{name}.yaml").write_text(text)
    if keys == "a link":
        (tmp_path / "run.yaml").unlink()
        (tmp_path / "run.yaml").symlink_to("private.yaml")
    for name in ("theirs", "run"):
        os.chown(tmp_path / f"{name}.yaml", NOBODY, NOBODY, follow_symlinks=False)
    if why:
        assert f": {why}; give a readable .yaml file." in refusal(RecipeError, load, str(tmp_path / "run.yaml"))
    else:
        assert load(str(tmp_path / "run.yaml")).model == "linear"


def shipped_entries() -> list[str]:
    return [f"{file}:{entry}" for file in known() for entry in YAML(typ="safe").load(SHIPPED / f"{file}.yaml")]


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """mine(text): `mine.yaml` with that text, in the working folder."""
    monkeypatch.chdir(tmp_path)

    def write(text: str | bytes) -> str:
        Path("mine.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        return "mine.yaml"

    return write


MEASURED = {"digits:default": {"valid_acc1": 0.978}, "text:default": {"valid_loss": 1.443}}


def test_every_shipped_entry_loads_and_survives_its_dump(mine):
    for name in shipped_entries():
        loaded = load(name)
        assert loaded.name == name
        assert load(mine(dump(loaded))) == loaded.model_copy(update={"name": "mine.yaml"})
        assert loaded.expected == MEASURED.get(name, {})


# The table of the NERSC SC20 tutorial: batch, LR, warm-up, epochs; AMP, NHWC, extra options; profile.
LADDER = {
    "default": (128, 0.1, 0, 100, "", False),
    "bs128": (128, 0.1, 0, 100, "", False),
    "cosine": (128, 0.1, 0, 100, "", False),
    "bs256": (256, 0.14, 0, 100, "", False),
    "bs256-prof": (256, 0.14, 0, 2, "", True),
    "bs256-amp": (256, 0.14, 0, 100, "amp", False),
    "bs256-amp-prof": (256, 0.14, 0, 2, "amp", True),
    "bs256-amp-nhwc": (256, 0.14, 0, 100, "amp nhwc", False),
    "bs256-amp-nhwc-prof": (256, 0.14, 0, 2, "amp nhwc", True),
    "bs256-amp-nhwc-extra-opts": (256, 0.14, 0, 100, "amp nhwc extra", False),
    "bs256-amp-nhwc-extra-opts-prof": (256, 0.14, 0, 2, "amp nhwc extra", True),
    "bs512": (512, 0.2, 0, 100, "", False),
    "bs1024": (1024, 0.28, 8, 100, "", False),
    "bs2048": (2048, 0.4, 16, 100, "", False),
    "bs128-opt": (128, 0.1, 0, 100, "amp nhwc extra", False),
    "bs512-opt": (512, 0.2, 0, 120, "amp nhwc extra", False),
    "bs1024-opt": (1024, 0.28, 0, 120, "amp nhwc extra", False),
    "bs2048-opt": (2048, 0.4, 0, 120, "amp nhwc extra", False),
    "bs1024-warmup-opt": (1024, 0.28, 8, 120, "amp nhwc extra", False),
    "bs2048-warmup-opt": (2048, 0.4, 16, 120, "amp nhwc extra", False),
}


@pytest.mark.parametrize("entry", LADDER)
def test_cifar100_is_the_nersc_ladder(entry):
    batch, lr, warmup, epochs, options, profile = LADDER[entry]
    r = load(f"cifar100:{entry}")
    assert (r.batch_size, r.base_lr, r.warmup_epochs, r.epochs, r.profile) == (batch, lr, warmup, epochs, profile)
    assert (r.precision == "float16") == ("amp" in options)
    assert r.channels_last == ("nhwc" in options)
    assert r.fused_optimizer == r.cudnn_benchmark == ("extra" in options)
    assert (r.model, r.stem, r.dataset) == ("resnet50", "cifar", "cifar100")
    assert (r.momentum, r.weight_decay, r.nesterov, r.lr_rule) == (0.9, 5e-4, False, "none")
    assert r.lr_schedule == ("cosine" if entry == "cosine" else "plateau")
    assert (r.lr_factor, r.plateau_patience) == (0.2, 10)


# Above the tutorial's top: what each entry changes in the one it stands on.
BF16 = "bs256-bf16-nhwc-extra-opts"
FAST = {
    "batch_size": 1024, "base_lr": 0.1, "base_batch_size": 128, "lr_rule": "linear", "warmup_epochs": 5.0,
    "lr_schedule": "cosine", "nesterov": True, "label_smoothing": 0.1, "epochs": 40, "checkpoint_every_epochs": 10,
}  # fmt: skip
ABOVE = {
    BF16: ("bs256-amp-nhwc-extra-opts", {"precision": "bfloat16"}),
    f"{BF16}-compile": (BF16, {"compile": True}),
    f"{BF16}-compile-resident": (f"{BF16}-compile", {"data_on_device": True}),
    "fast": (f"{BF16}-compile-resident", FAST),
    **{
        f"{entry}-prof": (entry, {"epochs": 2, "profile": True})
        for entry in (BF16, f"{BF16}-compile", f"{BF16}-compile-resident")
    },
    "fast-prof": ("fast", {"epochs": 2, "warmup_epochs": 1.0, "profile": True}),
}


@pytest.mark.parametrize("entry", ABOVE)
def test_each_rung_above_changes_one_thing(entry):
    base, changes = ABOVE[entry]
    expected = load(f"cifar100:{base}").model_dump() | changes
    assert load(f"cifar100:{entry}").model_dump() == expected | {"name": f"cifar100:{entry}"}


def test_the_ladder_has_no_other_entry():
    entries = {f"cifar100:{entry}" for entry in (*LADDER, *ABOVE)}
    assert entries == {name for name in shipped_entries() if "cifar100" in name}


NUMBERS = {
    "linear": {"batch_size": 100, "base_lr": 0.5, "epochs": 150, "momentum": 0.0, "model": "linear"},
    "digits": {"dataset": "digits", "stem": "cifar", "model": "resnet50"},
    "imagenet": {
        "epochs": 90,
        "base_lr": 0.1,
        "base_batch_size": 256,
        "batch_size_per_rank": 256,
        "lr_rule": "linear",
        "warmup_epochs": 5.0,
        "lr_schedule": "step",
        "lr_milestones": (30, 60, 80),
        "lr_factor": 0.1,
        "weight_decay": 5e-5,
        "train_crop": 224,
        "valid_crop": 224,
    },
    "imagenet:crop176": {"train_crop": 176, "valid_crop": 224, "epochs": 90},
    "imagenet:crop176-amp": {"train_crop": 176, "precision": "bfloat16", "channels_last": True},
    "imagenet:a3": {"train_crop": 160, "valid_resize": 235, "valid_crop": 224, "epochs": 100, "batch_size": 2048},
    "synthetic": {"dataset": "synthetic", "image_size": 224, "classes": 1000},
    "linear:full-batch": {"batch_size": 1000, "base_lr": 0.5},
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_the_other_recipes(name):
    loaded = load(name)
    assert {key: getattr(loaded, key) for key in NUMBERS[name]} == NUMBERS[name]


def test_a_batch_given_by_a_flag_replaces_the_recipes():
    batches = {
        ("linear", "batch_size_per_rank", 10): (None, 10),
        ("imagenet", "batch_size", 64): (64, None),
        ("linear", "batch_size", 50): (50, None),
    }
    for (name, key, value), batch in batches.items():
        loaded = load(name, {key: value})
        assert (loaded.batch_size, loaded.batch_size_per_rank) == batch


def test_a_chain_of_extends(mine):
    a = "a:\n  extends: mine.yaml\n  epochs: 5\n  seed: 1\n"
    mine(f"{BASE}{a}b:\n  extends: a\n  batch_size_per_rank: 7\n")
    b = load("mine.yaml:b")
    assert (b.epochs, b.seed, b.base_lr, b.batch_size, b.batch_size_per_rank) == (5, 1, 0.002, None, 7)
    assert load("mine.yaml:").epochs == 3


def test_extending_a_shipped_recipe(mine):
    mine("default:\n  extends: cifar100:bs2048\n  epochs: 7\n  warmup_epochs: 2\n")
    assert load("mine.yaml") == load("cifar100:bs2048", {"epochs": 7, "warmup_epochs": 2}).model_copy(
        update={"name": "mine.yaml"}
    )


def test_dump_and_load_keep_every_value(mine):
    keys = {
        "data_dir": Path("/x y: #é"),
        "lr_schedule": "step",
        "lr_milestones": (1, 2),
        "base_lr": 1e-7,
        "weight_decay": 1 / 3,
        "cycle_time_ms": 3.5,
        "seed": 2**63 - 1,
        "max_steps": 10**12,
        "horovod_timeline": True,
    }
    loaded = load("linear", keys)
    text = dump(loaded)
    assert text.startswith("# linear, resolved\ndefault:\n")
    assert load(mine(text)) == loaded.model_copy(update={"name": "mine.yaml"})


def test_a_recipe_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        load("linear").epochs = 3


VALUES = [  # a key, its value, and the rule that it breaks
    ("epochs", 1.5, "be a whole number"),
    ("epochs", "3", "be a whole number"),
    ("epochs", 0, "be greater than 0"),
    ("batch_size", 0, "be greater than 0"),
    ("image_size", 0, "be greater than 0"),
    ("base_lr", "fast", "be a number"),
    ("base_lr", 0, "be greater than 0"),
    ("base_lr", float("nan"), "be a finite number"),
    ("momentum", 1.0, "be less than 1"),
    ("momentum", -0.5, "be at least 0"),
    ("seed", -1, "be at least 0"),
    ("seed", 2**64, f"be less than {2**63}"),
    ("nesterov", "yes", "be true or false"),
    ("lr_milestones", 30, "be a list"),
    ("data_dir", 3, "be a path"),
    ("expected", 0.5, "map names to values"),
    ("lr_factor", 1, "be less than 1"),
]


@pytest.mark.parametrize(("key", "value", "rule"), VALUES)
def test_refused_values(key, value, rule):
    assert refusal(RecipeError, validate, {**KEYS, key: value}) == f"{key} must {rule}, got {value!r}."


REFUSED = {
    "unknown model": (
        {"model": "vgg"},
        "model must be one of linear, resnet50, resnet101, gpt, inception_v3, vgg16, or an import path such as "
        "package.module:name, got 'vgg'. Did you mean vgg16?",
    ),
    "half a milestone": ({"lr_milestones": [1.5]}, "each of lr_milestones must be a whole number, got 1.5."),
    "milestone 0": ({"lr_milestones": [0]}, "each of lr_milestones must be greater than 0, got 0."),
    "figure that is none": ({"expected": {"valid_acc1": "high"}}, "each of expected must be a number, got 'high'."),
    "endless figure": (
        {"expected": {"valid_acc1": float("inf")}},
        "each of expected must be a finite number, got inf.",
    ),
    "name that no terminal shows": (
        {"expected": {"acc\x1b": 0.5}},
        "a name must have up to 4096 characters, all printable, got 'acc\\x1b'.",
    ),
    "misspelt key": ({"epocs": 3}, "unknown key 'epocs'. Did you mean epochs?"),
    "key that is a number": ({3: 4}, "unknown key '3'."),
    "batch given twice": (
        {"batch_size_per_rank": 3},
        "the batch must be given once: batch_size (global) or batch_size_per_rank, "
        "got batch_size=100, batch_size_per_rank=3.",
    ),
    "batch not given": (
        {"batch_size": None},
        "the batch must be given once: batch_size (global) or batch_size_per_rank, "
        "got batch_size=None, batch_size_per_rank=None.",
    ),
    "warm-up beyond the end": ({"warmup_epochs": 120}, "warmup_epochs must lie in [0, epochs=3], got 120."),
    "rule without a base": (
        {"lr_rule": "linear"},
        "lr_rule linear needs base_batch_size, the global batch that base_lr holds at.",
    ),
    "steps without milestones": (
        {"lr_schedule": "step"},
        "lr_schedule step needs lr_milestones, the epochs at which the LR drops.",
    ),
    "milestones falling": ({"lr_milestones": [3, 2]}, "lr_milestones must rise, got [3, 2]."),
    "line through images": (
        {"dataset": "digits"},
        "model linear cannot learn dataset digits: linear goes with linear only.",
    ),
    "ResNet on a line": (
        {"model": "resnet50"},
        "model resnet50 cannot learn dataset linear: linear goes with linear only.",
    ),
    "Adasum, clipped": (
        {"reduction": "adasum", "clip_norm": 1.0},
        "reduction adasum goes with neither clip_norm nor compression fp16; drop them.",
    ),
    "Adasum in float16": (
        {"reduction": "adasum", "precision": "float16"},
        "reduction adasum goes with float32 or bfloat16: float16's overflows are not shared.",
    ),
    "Adasum, compressed": (
        {"reduction": "adasum", "compression": "fp16"},
        "reduction adasum goes with neither clip_norm nor compression fp16; drop them.",
    ),
    "XLA around a collective": (
        {"xla": True, "batch_norm": "sync"},
        "xla goes with batch_norm local or frozen: sync puts a collective into what XLA compiles.",
    ),
    "compiled around a collective": (
        {"compile": True, "batch_norm": "sync"},
        "compile goes with batch_norm local or frozen: sync puts a collective into what is compiled.",
    ),
    "smoothed line": (
        {"label_smoothing": 0.1, "model": "linear", "dataset": "linear"},
        "label_smoothing is for classes, which model linear has not; drop it.",
    ),
    "files on the device": (
        {"data_on_device": True, "model": "resnet50", "dataset": "imagenet"},
        "data_on_device needs a data set in memory, imagenet is read from files; drop it.",
    ),
    "readers of what lies on the device": (
        {"data_on_device": True, "workers": 2},
        "data_on_device leaves nothing to read: workers must be 0, got 2.",
    ),
    "crop beyond the image": ({"valid_crop": 300}, "valid_crop must be at most valid_resize=256, got 300."),
}


@pytest.mark.parametrize(("keys", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_keys(keys, message):
    assert refusal(RecipeError, validate, {**KEYS, **keys}) == message


def test_a_missing_key_says_what_it_means():
    for key in KEYS.keys() - {"batch_size", "name"}:
        message = refusal(RecipeError, validate, {k: v for k, v in KEYS.items() if k != key})
        assert message == f"{key} is missing: {Recipe.model_fields[key].description}."


RECIPES = f"Recipes: {', '.join(known())}; or give a file ending in .yaml."
NAMES = {
    "misspelt recipe": ("lineer", f"unknown recipe 'lineer'. Did you mean linear? {RECIPES}"),
    "path out of the folder": ("../recipes/linear", f"unknown recipe '../recipes/linear'. {RECIPES}"),
    "a program": (
        "train.py",
        "'train.py' is a program, no recipe; start it as python train.py, or horovodrun -np 2 python train.py.",
    ),
    "misspelt entry": (
        "linear:fullbatch",
        "recipe linear has no entry 'fullbatch'. Did you mean full-batch? Entries: default, full-batch, single-sample.",
    ),
    "file that is not there": (
        "/nowhere/x.yaml",
        "cannot read recipe file /nowhere/x.yaml: No such file or directory; give a readable .yaml file.",
    ),
}


@pytest.mark.parametrize(("name", "message"), NAMES.values(), ids=NAMES)
def test_refused_names(name, message):
    assert refusal(RecipeError, load, name) == message


FILES = {
    "doubled key": (
        f"{BASE}  epochs: 4\n",
        "mine.yaml line 7: key 'epochs' stands twice in one entry; remove one of them.",
    ),
    "doubled entry": (
        f"{BASE}default: {{}}\n",
        "mine.yaml line 7: key 'default' stands twice in one entry; remove one of them.",
    ),
    "empty": ("", "mine.yaml must hold named entries (name: keys), got None."),
    "a list": ("- a\n", "mine.yaml must hold named entries (name: keys), got ['a']."),
    "empty entry": ("default:\n", "entry default of mine.yaml must map keys to values, got None."),
    "only an entry named 1": ("1: {}\n", "recipe mine.yaml has no entry 'default'. Entries: 1."),
    "extends a number": (
        "default:\n  extends: 3\n",
        "extends in entry default of mine.yaml must name a recipe, as linear:default does, got 3.",
    ),
    "extends itself": (
        "default:\n  extends: mine.yaml\n",
        "mine.yaml extends itself through mine.yaml; remove one `extends`.",
    ),
    "extends in a ring": (
        "default:\n  extends: mine.yaml:a\na:\n  extends: mine.yaml\n",
        "mine.yaml extends itself through mine.yaml -> mine.yaml:a; remove one `extends`.",
    ),
    "colon in a value": ("a: b: c\n", "mine.yaml line 1 is not YAML: mapping values are not allowed here."),
    "undefined alias": ("default: *x\n", "mine.yaml line 1 is not YAML: found undefined alias 'x'."),
    "impossible date": (
        f"{BASE}  data_dir: 2024-13-01\n",
        "mine.yaml is not YAML: month must be in 1..12.",
    ),
    "control character": (
        "a: \x00",
        "mine.yaml is not YAML: unacceptable character #x0000: special characters are not allowed.",
    ),
    "Python object": (
        "default: !!python/object/apply:os.system [id]\n",
        "mine.yaml line 1 is not YAML: could not determine a constructor for the tag "
        "'tag:yaml.org,2002:python/object/apply:os.system'.",
    ),
    "not UTF-8": (
        b"a: \xff",
        "cannot read recipe file mine.yaml: 'utf-8' codec can't decode byte 0xff in position 3: invalid start byte; "
        "give a readable .yaml file.",
    ),
    "unknown key": (f"{BASE}  warmup: 2\n", "unknown key 'warmup'. Did you mean warmup_epochs?"),
    "unknown key in place of one that is missing": (
        BASE.replace("base_lr", "learning_rate"),
        "unknown key 'learning_rate'. Did you mean base_lr?",
    ),
}


@pytest.mark.parametrize(("text", "message"), FILES.values(), ids=FILES)
def test_refused_files(text, message, mine):
    assert refusal(RecipeError, load, mine(text)) == message


def test_a_folder_is_no_recipe_file(tmp_path):
    folder = tmp_path / "a.yaml"
    folder.mkdir()
    message = f"cannot read recipe file {folder}: Is a directory; give a readable .yaml file."
    assert refusal(RecipeError, load, str(folder)) == message


FOREIGN = [  # keys that only the other framework takes, and what refuses them
    ({"xla": True}, "torch", "xla compiles TensorFlow's steps, this run is PyTorch's; drop --xla."),
    ({"compile": True}, "tensorflow", "compile is PyTorch's, this run is TensorFlow's; drop it, or take xla."),
    ({"data_on_device": True}, "tensorflow", "data_on_device is PyTorch's, this run is TensorFlow's; drop it."),
    (
        {"reduction": "adasum", "channels_last": True},
        "torch",
        "reduction adasum goes without channels_last, which Horovod's Adasum refuses; drop one.",
    ),
]


@pytest.mark.parametrize(("keys", "foreign", "message"), FOREIGN)
def test_each_framework_refuses_keys_of_the_other(keys, foreign, message):
    requested = recipe.load("digits", keys)
    compatibility.check_choice(choice(adapter="tensorflow" if foreign == "torch" else "torch", recipe=requested), {})
    assert refusal(RecipeError, compatibility.check_choice, choice(adapter=foreign, recipe=requested), {}) == message


OF_A_NET = BASE.replace("model: linear", "model: m:Net")


@pytest.mark.parametrize("word", ["no", "yes", "off", "On"])
def test_booleans_of_yaml_1_1_are_refused(mine, word):
    rule = f"has {word}, which is a text in YAML 1.2 and true or false in 1.1; write true or false, or '{word}' for the"
    rule += " text."
    for value in (f"{{pretrained: {word}}}", f"{{of: [{word}]}}"):
        assert refusal(RecipeError, load, mine(f"{OF_A_NET}  model_args: {value}")) == f"mine.yaml line 7 {rule}"
    given = load(mine(f"{OF_A_NET}  model_args: {{of: '{word}', {word}: 1}}"))
    assert given.model_args == {"of": word, word: 1}
    assert load(mine(dump(given))).model_args == given.model_args
    assert refusal(RecipeError, flags._mapping, "--model-args", [f"of={word}"]) == f"--model-args of line 1 {rule}"


def test_off_is_a_word_of_its_own_key(mine):
    given = load(mine(f"{BASE}  sample_check: off"))
    assert (given.sample_check, load(mine(dump(given))).sample_check) == ("off", "off")


def test_arguments_are_read_as_yaml_1_2_and_a_tilde_is_the_home(mine, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    text = f"{OF_A_NET}  data_dir: ~/cells\n  model_args: {{a: 010, b: 12:30, c: ~, d: ~/x, e: 'no'}}"
    loaded = load(mine(text))
    assert loaded.data_dir == Path("/home/ada/cells")
    assert loaded.model_args == {"a": 10, "b": "12:30", "c": None, "d": "~/x", "e": "no"}
    assert user_code.expanded(loaded.model_args, "model_args")["d"] == "/home/ada/x"


@pytest.mark.parametrize("written", ["$SCRATCH", "${SCRATCH}", "~"])
def test_a_recipe_file_is_found_by_a_variable(mine, monkeypatch, tmp_path, written):
    for name in ("SCRATCH", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / "s"))
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "base.yaml").write_text(f"{BASE}tall:\n  extends: {written}/base.yaml\n  epochs: 9\n")
    assert load(f"{written}/base.yaml").epochs != 9
    assert load(mine(f"default:\n  extends: {written}/base.yaml:tall\n")).epochs == 9


def test_folders_keep_their_variables_until_they_are_used(mine, monkeypatch):
    """As TMPDIR differs from job to job, and a run is found again by the text of its recipe."""
    monkeypatch.setenv("DATA", "/data")
    monkeypatch.setenv("TMPDIR", "/tmp/job.1")
    chosen = recipe.load("imagenet", {"data_dir": "${DATA}/a$", "cache_dir": "$TMPDIR/$DATA"})
    assert load(mine(dump(chosen))).model_dump(exclude={"name"}) == chosen.model_dump(exclude={"name"})
    found = recipe.located(chosen)
    assert (found.data_dir, found.cache_dir) == (Path("/data/a$"), Path("/tmp/job.1/data"))
    monkeypatch.setenv("TMPDIR", "/tmp/job.2")
    assert recipe.located(chosen).cache_dir == Path("/tmp/job.2/data") and "$TMPDIR" in dump(chosen)


@pytest.mark.parametrize("value", [None, ""], ids=["unset", "empty"])
def test_a_variable_that_is_not_set_is_one_ranks_own_fault(mine, monkeypatch, value):
    """An empty one would have the set copied into the root, or the current folder."""
    monkeypatch.delenv("NO_SUCH", raising=False)
    if value is not None:
        monkeypatch.setenv("NO_SUCH", value)
    rule = "needs the environment variable $NO_SUCH, which is not set; export it."
    chosen = recipe.load("imagenet", {"cache_dir": "$NO_SUCH"})
    with pytest.raises(RecipeError) as refused:
        recipe.located(chosen)
    assert (str(refused.value), refused.value.everywhere) == (f"cache_dir {rule}", False)
    message = refusal(RecipeError, load, mine("default:\n  extends: $NO_SUCH/a.yaml\n"))
    assert message == f"recipe file $NO_SUCH/a.yaml {rule}"
    assert refusal(RecipeError, user_code.expanded, {"a": ["$NO_SUCH"]}, "model_args") == f"model_args a {rule}"
