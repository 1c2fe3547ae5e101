"""Parts of the TensorFlow adapter, compared with PyTorch's: networks, BatchNorm, SGD, clipping, the loss scale."""

from types import SimpleNamespace

import numpy as np
import optimizer_reference as papers
import pytest
from event_files import events, scalars
from networks import CLASSES as DATA_SETS
from networks import ENTRIES
from ranks import needs_tensorflow
from worlds import BATCH_NORM, CLASSES, CLIPPING, ON_TWO_RANKS, SCALING, SGD, of_kind

from hvdtrain.core import recipe
from hvdtrain.engines import frameworks

torch = pytest.importorskip("torch", reason="the reference is PyTorch's: pip install -e .[torch]")
pytestmark = [pytest.mark.launched, needs_tensorflow, pytest.mark.timeout(900)]

from hvdtrain.torch import models  # noqa: E402


@pytest.fixture
def results(world):
    """`results(program)`: the results of a program in one process."""
    return lambda program: world("alone-1-networks" if program == "networks" else "alone-1", "tensorflow").results[
        program
    ][0]


def wide(values):
    return torch.tensor(values, dtype=torch.float64)


def channels_first(values):
    return wide(values).movedim(-1, 1)


def test_the_networks_have_the_parameters_of_the_plan(results):
    few, many = results("networks")["trainable"]
    assert many == 25_557_032  # torchvision's
    of_a_class = (many - few) / (CLASSES[1] - CLASSES[0])
    for chosen in map(recipe.load, ENTRIES):
        if classes := DATA_SETS.get(chosen.dataset, chosen.classes):
            of_plan = frameworks.network_of(chosen, "tensorflow", SimpleNamespace(classes=classes, sample_shape=()))
            assert of_plan.parameters == few + (classes - CLASSES[0]) * of_a_class


def test_the_first_weights_are_drawn_as_torchs(results):
    theirs = dict(models.resnet50(1000, "imagenet").named_parameters())
    names = {"kernel": "weight", "gamma": "weight", "bias": "bias", "beta": "bias"}
    seen = 0
    for path, (shape, std, most) in results("networks")["weights"].items():
        layer, _, kind = path.rpartition("/")
        if kind not in names:
            assert (std, most) == (0, float(kind == "moving_variance")), path
            continue
        weight = theirs[f"{layer}.{names[kind]}"].detach()
        assert sorted(shape) == sorted(weight.shape), path
        assert std == pytest.approx(weight.std(correction=0).item(), rel=0.1, abs=1e-9), path
        assert most == pytest.approx(weight.abs().max().item(), rel=0.4, abs=1e-9), path
        seen += 1
    assert seen == len(theirs)


def test_a_stem_leaves_maps_of_a_size(results):
    assert results("networks")["maps"] == [["cifar", 8, 8, 1], ["cifar", 32, 32, 4], ["imagenet", 64, 16, 2]]


def test_the_seed_alone_decides_the_first_weights(results):
    assert results("seeds") == [True, False]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_fingerprint_shows_every_flipped_bit_and_swap(results, dtype):
    marks = results("fingerprints")[dtype]
    assert marks == {"seen": marks["flips"] + 1, "flips": 8 * 8 * np.dtype(dtype).itemsize, "unseen": [], "same": True}


def reference(case, x, g):
    """The results of PyTorch's BatchNorm2d for the images [steps, n, height, width, maps], in float64."""
    values = BATCH_NORM["values"]
    layer = torch.nn.BatchNorm2d(len(values["gamma"])).double()
    for ours, theirs in (("gamma", "weight"), ("beta", "bias")):
        getattr(layer, theirs).data = wide(values[ours])
    for ours, theirs in (("moving_mean", "running_mean"), ("moving_variance", "running_var")):
        getattr(layer, theirs).copy_(wide(values[ours]))
    results = {"out": [], "x gradient": [], "gamma gradient": [], "beta gradient": []}
    layer.train("frozen" not in case)
    for one_x, one_g in zip(x, g, strict=True):
        images = channels_first(one_x).requires_grad_()
        out = layer(images)
        found = (out, *torch.autograd.grad(out, [images, layer.weight, layer.bias], channels_first(one_g)))
        for name, tensor in zip(results, found, strict=True):
            results[name].append(tensor.detach().numpy())
    layer.eval()
    results["evaluated"] = layer(channels_first(x[0])).detach().numpy()
    results["moving_mean"], results["moving_variance"] = layer.running_mean.numpy(), layer.running_var.numpy()
    return {name: np.array(value) for name, value in results.items()}


def as_torch_has_it(results):
    """A rank's values as arrays; in images the maps come first, as in PyTorch."""
    arrays = {name: np.array(value) for name, value in results.items() if name != "dtype"}
    images = ("out", "x gradient", "evaluated")
    return {name: np.moveaxis(array, -1, -3) if name in images else array for name, array in arrays.items()}


LIMITS = {"float32": 2e-5, "float64": 1e-12, "float16": 2e-2}


def check(ours, theirs, precision, but=()):
    assert set(ours) == set(theirs)
    for name in set(ours) - set(but):
        most = np.abs(theirs[name]).max()
        np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=LIMITS[precision] * most, err_msg=name)


CASES = list(BATCH_NORM["recipes"])


@pytest.mark.parametrize("case", CASES)
def test_batch_norm_is_torchs(results, case):
    precision = BATCH_NORM["recipes"][case]["precision"]
    x, g = BATCH_NORM["values"]["x"], BATCH_NORM["values"]["g"]
    ours = results("batch_norm")[case]
    assert ours["dtype"] == precision
    check(as_torch_has_it(ours), reference(case, x, g), precision)


@pytest.mark.parametrize("case", ON_TWO_RANKS)
def test_batch_norm_on_two_ranks(world, case):
    precision = BATCH_NORM["recipes"][case]["precision"]
    ranks = [as_torch_has_it(rank[case]) for rank in world("mpi-2", "tensorflow").results["batch_norm"]]
    x, g = (np.array(BATCH_NORM["values"][name]) for name in ("x", "g"))
    statistics = ("moving_mean", "moving_variance")
    for name in statistics:  # at an epoch's end they are averaged over the ranks
        np.testing.assert_array_equal(ranks[0][name], ranks[1][name])
    if "local" in case:
        theirs = [reference(case, *own) for own in zip(np.split(x, 2, 1), np.split(g, 2, 1), strict=True)]
        for name in statistics:
            mean = (theirs[0][name] + theirs[1][name]) / 2
            np.testing.assert_allclose(ranks[0][name], mean, rtol=LIMITS[precision])
        for ours, own in zip(ranks, theirs, strict=True):
            check(ours, own, precision, but=(*statistics, "evaluated"))
        return
    whole = {name: np.concatenate([rank[name] for rank in ranks], 1) for name in ("out", "x gradient")}
    whole |= {name: ranks[0][name] + ranks[1][name] for name in ("gamma gradient", "beta gradient")}
    whole |= {name: ranks[0][name] for name in statistics}
    whole |= {"evaluated": np.concatenate([rank["evaluated"] for rank in ranks])}
    check(whole, reference(case, x, g), precision)


def test_frozen_statistics_stay_while_training(results):
    assert results("frozen") == {"moving_mean": 0, "moving_variance": 0, "trainable": 1}


def test_a_model_takes_no_checkpoint_of_other_constants_or_none(results):
    assert results("constants") == [True, False, False]


@pytest.mark.parametrize("options", SGD["options"])
def test_sgd_is_torchs(results, options):
    weight = torch.nn.Parameter(wide(SGD["start"]))
    optimizer = torch.optim.SGD([weight], lr=1.0, **SGD["options"][options])
    for gradient, lr, ours in zip(SGD["gradients"], SGD["lrs"], results("sgd_steps")[options], strict=True):
        weight.grad = wide(gradient)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        np.testing.assert_allclose(ours, weight.detach(), rtol=1e-14)


@pytest.mark.parametrize(("precision", "limit"), [("float64", 1e-12), ("float32", 1e-6)])
@pytest.mark.parametrize("case", papers.CASES)
def test_twenty_updates_are_the_papers(results, case, precision, limit):
    ours = results("optimizer_steps")[f"{case} {precision}"]
    steps = [dict(zip(papers.START, map(np.array, weights), strict=True)) for weights in ours["followed"]]
    for (name, expected), average in zip(papers.weights(case).items(), ours["averages"], strict=True):
        np.testing.assert_allclose(steps[-1][name], expected, rtol=0, atol=limit, err_msg=name)
        averaged = papers.averages((weights[name] for weights in steps), papers.START[name])
        np.testing.assert_allclose(average, averaged, rtol=0, atol=limit, err_msg=name)
    assert ours["as before"]


def test_clipping_is_torchs(results):
    for norm, ours in zip(CLIPPING["norms"], results("clipping"), strict=True):
        weights = [torch.nn.Parameter(torch.zeros(len(gradient)).double()) for gradient in CLIPPING["gradients"]]
        for weight, gradient in zip(weights, CLIPPING["gradients"], strict=True):
            weight.grad = wide(gradient)
        torch.nn.utils.clip_grad_norm_(weights, norm)
        for clipped, weight in zip(ours, weights, strict=True):
            np.testing.assert_allclose(clipped, weight.grad, rtol=1e-12)


def test_the_loss_scale_is_torchs(results):
    ours = results("scaling")
    theirs = torch.amp.GradScaler("cpu", growth_interval=SCALING["interval"])
    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    assert ours["first"] == torch.amp.GradScaler("cpu").state_dict()
    for finite, (scale, steps) in zip(SCALING["finite"], ours["then"], strict=True):
        theirs.scale(weight * (1.0 if finite else float("inf"))).backward()
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        assert (scale, steps) == (theirs.get_scale(), theirs.state_dict()["_growth_tracker"])
    assert ours["kept"] == ours["then"][-1]


def test_an_event_file_holds_what_was_written(world):
    folder = world("alone-1", "tensorflow").folder
    head, start, *_ = events(folder)
    assert head.file_version == "brain.Event:2"
    assert (start.step, start.session_log.status) == (
        7,
        start.session_log.START,
    )  # readers ignore later steps of older files
    assert scalars(folder) == {"loss": [(7, 0.5), (8, 0.25)], "lr": [(8, 1.0)]}


def test_a_runs_events_are_its_records(world):
    folder = world("alone-1", "tensorflow").folder / "short"
    written = {tag: dict(values) for tag, values in scalars(folder).items()}
    steps = {line["step"]: line["loss"] for line in of_kind("step", folder)}
    assert written["loss/step"] == pytest.approx(steps, rel=1e-6)
    for kind in ("train", "valid"):
        expected = {line["step"]: line[f"{kind}_loss"] for line in of_kind("epoch", folder)}
        assert written[f"loss/{kind}"] == pytest.approx(expected, rel=1e-6)
