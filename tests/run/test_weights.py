"""Which tensors of a file a network takes, by name and shape, without a framework."""

import numpy as np
import pytest
import safetensors.numpy
from refusals import refusal

from hvdtrain.core.recipe import load
from hvdtrain.errors import CheckpointError
from hvdtrain.record.folder import ResumePoint
from hvdtrain.run import weights

OWN = {"body.weight": "float [4, 3]", "body.bias": "float [4]", "fc.weight": "float [2, 4]", "fc.bias": "float [2]"}


def recipe(**keys):
    return load("digits", {"init_from": "given.pt", **keys})


FITS = {  # by name: keys of the recipe, the names in the file, and those of OWN that are taken
    "alike": ({}, [*OWN], [*OWN]),
    "wrapped": ({}, [f"module._orig_mod.{name}" for name in OWN], [*OWN]),
    "of Lightning": ({}, [f"model.{name}" for name in OWN], [*OWN]),
    "but for the head": ({"init_skip": ["fc"]}, [*OWN][:2], [*OWN][:2]),
    "with a head to leave": ({"init_skip": ["fc", "head"]}, [*[*OWN][:2], "head.weight"], [*OWN][:2]),
    "renamed": ({"init_rename": {"trunk": "body"}}, ["trunk.weight", "trunk.bias", "fc.weight", "fc.bias"], [*OWN]),
    "below another": ({"init_rename": {"": "body"}, "init_skip": ["fc"]}, ["weight", "bias"], [*OWN][:2]),
}


@pytest.mark.parametrize("case", FITS)
def test_names_that_fit(case):
    keys, there, taken = FITS[case]
    found = {name: OWN[f"{'fc' if 'fc' in name else 'body'}.{name.rpartition('.')[2]}"] for name in there}
    got = weights.assigned(recipe(**keys), OWN, found, {})
    assert sorted(got) == sorted(taken)
    assert all(ours.rpartition(".")[2] == theirs.rpartition(".")[2] for ours, theirs in got.items())


WRONG = {
    "missing": ([*OWN][:3], OWN, "missing: fc.bias. Give init_rename"),
    "left over": ([*OWN, "more"], {**OWN, "more": "float [1]"}, "left over: more. Give init_rename"),
    "of another shape": ([*OWN], {**OWN, "fc.bias": "float [9]"}, "fc.bias is float [9], here float [2]. Give init_re"),
    "nothing": (
        [],
        OWN,
        "missing: body.weight, body.bias, fc.weight, fc.bias. Give init_rename where the names differ",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_listed(case):
    names, kinds, said = WRONG[case]
    message = refusal(CheckpointError, weights.assigned, recipe(), OWN, {name: kinds[name] for name in names}, {})
    assert message.startswith("init_from given.pt does not fit model resnet50: ") and said in message
    assert "init_skip: [" in message


def test_tied_tensors_and_a_skip_of_all():
    also = {"head.weight": "fc.weight"}
    assert "fc.weight" in weights.assigned(recipe(), OWN, {**OWN, "head.weight": OWN["fc.weight"]}, also)
    message = refusal(CheckpointError, weights.assigned, recipe(init_skip=["*"]), OWN, OWN, {})
    assert message == "init_from given.pt: init_skip leaves nothing to take; drop it."
    with pytest.raises(ValueError, match="it has a name of 2,000 characters"):
        weights.assigned(recipe(), OWN, {"x" * 2000: "float [1]"}, {})


def test_what_is_not_there_is_refused_before_a_framework_is_loaded(tmp_path):
    path = tmp_path / "given.pt"
    check = weights.checked
    assert "is not there; give the path of a file" in refusal(
        CheckpointError, check, recipe(init_from=str(path)), "torch", ResumePoint()
    )
    path.touch()
    assert check(recipe(init_from=str(path)), "torch", ResumePoint()) == []
    assert "for tensorflow, got" in refusal(
        CheckpointError, check, recipe(init_from=str(path)), "tensorflow", ResumePoint()
    )
    assert check(load("digits"), "torch", ResumePoint()) == []


def test_a_file_is_read_and_its_header_is_bounded(tmp_path):
    path = tmp_path / "given.safetensors"
    safetensors.numpy.save_file({"a": np.arange(3.0)}, path)
    assert weights.safetensors(path, "np")["a"].tolist() == [0, 1, 2]
    path.write_bytes((1 << 40).to_bytes(8, "little") + bytes(100))
    with pytest.raises(ValueError, match="it has a header of more than"):
        weights.safetensors(path, "np")
    message = refusal(CheckpointError, lambda: raised(path))
    assert (
        message.endswith("); give a whole file of weights.") and "cannot be read (ValueError: it has a head" in message
    )


def raised(path):
    with weights.explained(str(path)):
        weights.safetensors(path, "np")
