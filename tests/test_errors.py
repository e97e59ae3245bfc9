"""Users' mistakes: the type of the error, and a message that names the argument, its value and what was expected."""

import pytest
import torch
from oracle import problem

from cce import LinearCrossEntropyHead, linear_cross_entropy

E, C, T = problem(4, 7, 3)
BIAS = torch.zeros(7)
MESSAGES = [
    # arguments, error, what the message must hold: name, value, expectation
    ({"e": [[1.0]]}, TypeError, ["e:", "list", "Tensor"]),
    ({"c": None}, TypeError, ["c:", "NoneType", "Tensor"]),
    ({"targets": [0, 1, 2, 3]}, TypeError, ["targets:", "list", "Tensor"]),
    ({"bias": "x"}, TypeError, ["bias:", "str", "Tensor"]),
    ({"bias": True}, TypeError, ["bias:", "bool", "Tensor"]),
    ({"bias": 0.5}, TypeError, ["bias:", "float", "Tensor"]),
    ({"weight": [1.0] * 7}, TypeError, ["weight:", "list", "Tensor"]),
    ({"e": E.long()}, TypeError, ["e:", "int64", "float32"]),
    ({"e": E.to(torch.complex64)}, TypeError, ["e:", "complex64", "float32"]),
    ({"c": C.int()}, TypeError, ["c:", "int32", "float32"]),
    ({"bias": BIAS.long()}, TypeError, ["bias:", "int64", "float32"]),
    ({"weight": BIAS.long()}, TypeError, ["weight:", "int64", "float32"]),
    ({"targets": T.float()}, TypeError, ["targets:", "float32", "integer"]),
    ({"targets": T.bool()}, TypeError, ["targets:", "bool", "integer"]),
    ({"e": E.bfloat16()}, TypeError, ["c:", "bfloat16", "float32", "autocast"]),
    ({"c": C.double()}, TypeError, ["c:", "float64", "float32"]),
    ({"c": C[0]}, ValueError, ["c:", "[V, D]", "(3,)"]),
    ({"c": C[None]}, ValueError, ["c:", "[V, D]", "(1, 7, 3)"]),
    ({"c": C.T}, ValueError, ["e:", "7", "(4, 3)", "is c transposed?"]),
    ({"c": torch.nn.Linear(3, 7)}, TypeError, ["c:", "Linear", "pass its .weight"]),
    ({"e": torch.tensor(1.0)}, ValueError, ["e:", "[..., D]", "()"]),
    ({"e": E[:, :2]}, ValueError, ["e:", "D", "3", "(4, 2)"]),
    ({"c": C[:0]}, ValueError, ["c:", "class", "(0, 3)"]),
    ({"e": E[:, :0], "c": C[:, :0]}, ValueError, ["c:", "feature", "(7, 0)"]),
    ({"targets": T[:3]}, ValueError, ["targets:", "(4,)", "(3,)"]),
    ({"targets": T[:, None]}, ValueError, ["targets:", "(4,)", "(4, 1)"]),
    ({"bias": BIAS[:6]}, ValueError, ["bias:", "(7,)", "(6,)"]),
    ({"bias": BIAS[:, None]}, ValueError, ["bias:", "(7,)", "(7, 1)"]),
    ({"weight": BIAS[:6]}, ValueError, ["weight:", "(7,)", "(6,)"]),
    ({"c": C.to("meta")}, ValueError, ["c:", "cpu", "meta"]),
    ({"targets": T.to("meta")}, ValueError, ["targets:", "cpu", "meta"]),
    ({"bias": BIAS.to("meta")}, ValueError, ["bias:", "cpu", "meta"]),
    ({"weight": BIAS.to("meta")}, ValueError, ["weight:", "cpu", "meta"]),
    ({"e": E.to("meta")}, ValueError, ["meta", "cpu"]),
    ({"ignore_index": None}, TypeError, ["ignore_index:", "None", "int"]),
    ({"ignore_index": 1.0}, TypeError, ["ignore_index:", "1.0", "int"]),
    ({"ignore_index": True}, TypeError, ["ignore_index:", "True", "int"]),
    ({"softcap": 0}, ValueError, ["softcap:", "0", "> 0"]),
    ({"softcap": -1.0}, ValueError, ["softcap:", "-1.0", "> 0"]),
    ({"softcap": float("inf")}, ValueError, ["softcap:", "inf", "finite"]),
    ({"softcap": float("nan")}, ValueError, ["softcap:", "nan", "finite"]),
    ({"softcap": "30"}, ValueError, ["softcap:", "'30'", "number"]),
    ({"softcap": True}, ValueError, ["softcap:", "True", "number"]),
    ({"label_smoothing": -0.1}, ValueError, ["label_smoothing:", "-0.1", "[0, 1]"]),
    ({"label_smoothing": 1.1}, ValueError, ["label_smoothing:", "1.1", "[0, 1]"]),
    ({"label_smoothing": float("nan")}, ValueError, ["label_smoothing:", "nan", "[0, 1]"]),
    ({"label_smoothing": None}, ValueError, ["label_smoothing:", "None", "[0, 1]"]),
    ({"z_loss": float("inf")}, ValueError, ["z_loss:", "inf", "finite"]),
    ({"z_loss": float("nan")}, ValueError, ["z_loss:", "nan", "finite"]),
    ({"z_loss": "1"}, ValueError, ["z_loss:", "'1'", "number"]),
    ({"reduction": "avg"}, ValueError, ["reduction:", "'avg'", "'mean', 'sum', 'none'"]),
    ({"reduction": None}, ValueError, ["reduction:", "None", "'mean', 'sum', 'none'"]),
    ({"reduction": ["mean"]}, ValueError, ["reduction:", "['mean']", "'mean', 'sum', 'none'"]),
    ({"shift": -1}, ValueError, ["shift:", "-1", ">= 0"]),
    ({"shift": 1.0}, ValueError, ["shift:", "1.0", "int"]),
    ({"shift": 5}, ValueError, ["shift:", "5", "(4,)"]),
    ({"e": E[0], "targets": T[0], "shift": 1}, ValueError, ["shift:", "1", "()"]),
    ({"filter_eps": -1e-3}, ValueError, ["filter_eps:", "-0.001", ">= 0"]),
    ({"filter_eps": "low"}, ValueError, ["filter_eps:", "'low'", '"auto"']),
    ({"filter_eps": float("nan")}, ValueError, ["filter_eps:", "nan", ">= 0"]),
    ({"filter_eps": True}, ValueError, ["filter_eps:", "True", "number"]),
    ({"impl": "fast"}, ValueError, ["impl:", "'fast'", "'chunked'", "'cce_exact'", "'gather'"]),
    ({"impl": None}, ValueError, ["impl:", "None", "'chunked'"]),
    ({"impl": 3}, ValueError, ["impl:", "3", "'chunked'"]),
    ({"vocab_parallel_options": object()}, TypeError, ["vocab_parallel_options", "None"]),
    ({"e": E.double(), "c": C.double(), "impl": "cce"}, TypeError, ["e:", "float64", "'cce'", "chunked"]),
    ({"e": E.double(), "c": C.double(), "impl": "cce_exact"}, TypeError, ["e:", "float64", "'cce_exact'", "chunked"]),
    ({"e": E.double(), "c": C.double(), "impl": "cce_kahan"}, TypeError, ["e:", "float64", "'cce_kahan'", "chunked"]),
    ({"softcap": 2.0, "label_smoothing": 0.1, "impl": "cce"}, ValueError, ["label_smoothing:", "softcap", "'cce'", "chunked"]),
    ({"e": E.double(), "c": C.double(), "impl": "gather"}, TypeError, ["e:", "float64", "'gather'", "chunked"]),
    (
        {"softcap": 2.0, "label_smoothing": 0.1, "impl": "gather"},
        ValueError, ["label_smoothing:", "softcap", "'gather'", "chunked"],
    ),
    (
        {"softcap": 2.0, "label_smoothing": 0.1, "impl": "cce_exact"},
        ValueError, ["label_smoothing:", "softcap", "'cce_exact'", "chunked"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "error", "parts"), MESSAGES, ids=lambda x: "" if isinstance(x, (list, type)) else ",".join(x)
)
def test_message(wrong, error, parts):
    with pytest.raises(error) as caught:
        linear_cross_entropy(**{"e": E, "c": C, "targets": T, **wrong})
    missing = [part for part in parts if part not in str(caught.value)]
    assert not missing, f"{caught.value} does not mention {missing}"


@pytest.mark.parametrize("impl", ["naive", "chunked", "cce_exact", "gather"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_weight_that_requires_grad(impl, label_smoothing):
    """No implementation differentiates with respect to class weights: an error (as F.cross_entropy), not a silent None."""
    weight = torch.ones(7, requires_grad=True)
    with pytest.raises((ValueError, TypeError), match="weight: .*grad"):
        linear_cross_entropy(E, C, T, weight=weight, label_smoothing=label_smoothing, impl=impl)


@pytest.mark.parametrize("wrong", [{"reduction": "avg"}, {"softcap": -1.0}, {"bias": BIAS[:6]}, {"shift": 9}], ids=str)
def test_checks_come_before_everything_ignored(wrong):
    """A batch without a counted token does not hide a mistake."""
    with pytest.raises(ValueError):
        linear_cross_entropy(E, C, torch.full_like(T, -100), **wrong)


def test_unknown_option_of_a_module():
    with pytest.raises(TypeError, match="smoothing"):
        LinearCrossEntropyHead(3, 7, smoothing=0.1)(E, T)


@pytest.mark.parametrize(
    ("wrong", "name"), [((0, 7), "in_features"), ((3, -1), "num_classes"), ((3.0, 7), "in_features")]
)
def test_sizes_of_a_head(wrong, name):
    with pytest.raises(ValueError, match=f"{name}: expected an int >= 1"):
        LinearCrossEntropyHead(*wrong)


# ---------------------------------------------------------------------------------------- targets out of range


@pytest.mark.parametrize(
    "impl", ["naive", "checkpoint", "chunked", "cce", "cce_exact", "gather", "torch_compile", "auto"]
)
@pytest.mark.parametrize("value", [7, -1, -99, 2**31, -(2**31), 2**62])
def test_out_of_range_target(impl, value, device):
    targets = T.clone()
    targets[2] = value
    with pytest.raises(IndexError) as caught:
        linear_cross_entropy(E.to(device), C.to(device), targets.to(device), impl=impl)
    for part in ("targets:", f"value {value} ", "position 2", "0 <= target < 7", "ignore_index=-100"):
        assert part in str(caught.value)


def test_first_out_of_range_target_is_named_whatever_is_ignored_before_it():
    targets = torch.tensor([[-100, 3], [9, -5]])
    with pytest.raises(IndexError, match="value 9 at flat position 2"):
        linear_cross_entropy(E.view(2, 2, 3), C, targets)


def test_minus_100_is_out_of_range_under_another_ignore_index():
    targets = T.clone()
    targets[1] = -100
    with pytest.raises(IndexError, match=r"value -100 at flat position 1 .*ignore_index=-1$"):
        linear_cross_entropy(E, C, targets, ignore_index=-1)


def test_out_of_range_position_counts_in_the_callers_targets():
    """With shift, too: the position is of the tensor that was passed."""
    targets = torch.tensor([[0, 1, 2], [3, 4, 7]])
    with pytest.raises(IndexError, match="value 7 at flat position 5"):
        linear_cross_entropy(torch.zeros(2, 3, 3), C, targets, shift=1)


def test_out_of_range_where_shift_never_looks():
    targets = torch.tensor([[99, 1, 2], [-5, 4, 6]])
    assert linear_cross_entropy(torch.zeros(2, 3, 3), C, targets, shift=1).isfinite()


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32], ids=str
)
def test_out_of_range_target_of_a_small_dtype(dtype):
    with pytest.raises(IndexError, match="value 100 at flat position 3"):
        linear_cross_entropy(E, C, torch.tensor([0, 1, 2, 100], dtype=dtype))


# -------------------------------------------------------------------------------------------------- DTensor


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    """A mesh of one process."""
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh

    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("dist") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("impl", ["naive", "chunked", "cce_exact", "gather", "auto"])
@pytest.mark.parametrize("name", ["e", "c", "targets", "bias", "weight"])
def test_dtensor(mesh, name, impl):
    from torch.distributed.tensor import Replicate, distribute_tensor

    inputs = {"e": E, "c": C, "targets": T, "bias": BIAS, "weight": torch.ones(7)}
    inputs[name] = distribute_tensor(inputs[name].clone(), mesh, [Replicate()])
    with pytest.raises(TypeError) as caught:
        linear_cross_entropy(**inputs, impl=impl)
    for part in (f"{name}:", "DTensor", "full_tensor()", "LinearCrossEntropyHead"):
        assert part in str(caught.value)


def test_dtensor_parameter(mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    c = torch.nn.Parameter(distribute_tensor(C.clone(), mesh, [Shard(0)]))
    with pytest.raises(TypeError, match=r"c: .*DTensor"):
        linear_cross_entropy(E, c, T)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=r"c: .*DTensor"):
        linear_cross_entropy(E, c, T)


def test_fsdp_gathers_the_weight_of_a_head(mesh):
    """What the message recommends works: FSDP2 shards the head and gathers it when it is called."""
    from torch.distributed.fsdp import fully_shard

    head = LinearCrossEntropyHead(3, 7)
    want = head(E, T).item()
    fully_shard(head, mesh=mesh)
    loss = head(E, T)
    loss.backward()
    assert loss.item() == pytest.approx(want, rel=1e-6)
    assert type(head.weight.grad).__name__ == "DTensor"


def test_numpy_scalars_are_numbers():
    numpy = pytest.importorskip("numpy")
    options = {"ignore_index": 2, "softcap": 3.0, "label_smoothing": 0.1, "z_loss": 0.5, "shift": 1}
    scalars = {name: numpy.int64(x) if isinstance(x, int) else numpy.float32(x) for name, x in options.items()}
    e = E.clone().requires_grad_()
    want, got = (linear_cross_entropy(e, C, T, **chosen) for chosen in (options, scalars))
    torch.testing.assert_close(got, want)
    got.backward()
    linear_cross_entropy(E, C, T, softcap=numpy.float64(3), filter_eps=numpy.float32(0.5), impl="cce")
