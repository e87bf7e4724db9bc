"""The rules table on meshes without devices: who lies where, and what is refused before anything is compiled."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jaxblock import Decoder
from jaxblock.axes import parameter_rule, path_name
from jaxblock.parallel import MeshShape, bytes_per_device, mesh_shape, parameter_shardings, state_shardings
from jaxblock.parallel.meshes import AXES
from jaxblock.training.config import OptimizerConfig, ParallelConfig
from jaxblock.training.optimizer import make_optimizer
from tests.residual.entries import NAMES
from tests.small import config

SIZES = {"width": 64, "heads": 8, "kv_heads": 8, "vocab_size": 64, "depth": 3}


def mesh(shape: MeshShape) -> AbstractMesh:
    return AbstractMesh(tuple(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


@functools.cache
def shapes(**changes):
    model = Decoder(config(**{**SIZES, **changes}))
    return jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]


def by_path(tree):
    return {path_name(path): leaf.spec for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def test_width_lies_on_fsdp_and_heads_hidden_and_vocabulary_on_tensor():
    specs = by_path(parameter_shardings(shapes(), mesh(MeshShape(fsdp=4, tensor=2))))
    assert specs["embedding/table"] == P("tensor", "fsdp")
    assert specs["blocks/attention/query/kernel"] == P(None, "fsdp", "tensor", None)
    assert specs["blocks/attention/output/kernel"] == P(None, "tensor", None, "fsdp")
    assert specs["blocks/feed_forward/up/kernel"] == P(None, "fsdp", "tensor")
    assert specs["blocks/feed_forward/down/kernel"] == P(None, "tensor", "fsdp")
    assert specs["blocks/feed_forward/up/bias"] == P(None, "tensor")  # no axis is left
    assert specs["blocks/attention/query/bias"] == P(None, "tensor", "fsdp")  # of what is left, the largest


def test_data_and_replicas_copy_parameters():
    specs = by_path(parameter_shardings(shapes(), mesh(MeshShape(replica=2, data=4))))
    assert all(axis is None for spec in specs.values() for axis in spec)


@pytest.mark.parametrize("residual", NAMES)
@pytest.mark.parametrize("algorithm", ["adamw", "muon", "adafactor"])
def test_fsdp_leaves_an_eighth_of_parameters_and_state_on_each_device(residual, algorithm):
    params = shapes(residual=residual, width=256, vocab_size=256)
    optimizer = make_optimizer(OptimizerConfig(algorithm=algorithm))
    state = {"params": params, "moments": jax.eval_shape(optimizer.init, params)}
    placed = {}
    for name, shape in (("fsdp", MeshShape(fsdp=8)), ("data", MeshShape(data=8))):
        shardings = state_shardings(state, params, mesh(shape))
        held = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings)
        placed[name] = bytes_per_device(held)
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert placed["data"] == total
    # What has no axis that 8 divides (gates, mixing weights) is whole everywhere, and small.
    assert placed["fsdp"] <= 1.05 * total / 8


def test_moments_lie_as_their_parameters_do():
    params = shapes()
    state = jax.eval_shape(make_optimizer(OptimizerConfig()).init, params)
    two = mesh(MeshShape(fsdp=4, tensor=2))
    specs, wanted = by_path(state_shardings(state, params, two)), by_path(parameter_shardings(params, two))
    moments = {path: spec for path, spec in specs.items() if path not in ("count", "0/count")}
    assert len(moments) == 2 * len(wanted)
    for path, spec in moments.items():
        assert spec == next(wanted[name] for name in wanted if path.endswith(f"u/{name}")), path


@pytest.mark.parametrize(
    ("changes", "shape", "words"),
    [
        ({"kv_heads": 2}, MeshShape(tensor=4), "parallel.tensor is 4 and model.kv_heads is 2"),  # B23
        (
            {"heads": 6, "kv_heads": 6, "width": 48},
            MeshShape(tensor=4),
            "parallel.tensor is 4 and model.kv_heads is 6",
        ),
        (
            {"width": 36, "heads": 2, "kv_heads": 2},
            MeshShape(fsdp=8),
            "parallel.fsdp is 8 and model.width is 36",
        ),
        ({"vocab_size": 63}, MeshShape(tensor=2), "parallel.tensor is 2 and model.vocab_size, padded is 63"),
    ],
)
def test_b23_an_axis_that_does_not_divide_is_refused_with_both_numbers(changes, shape, words):
    with pytest.raises(ValueError, match=words):
        parameter_shardings(shapes(**changes), mesh(shape))
    parameter_shardings(shapes(**changes), mesh(MeshShape(data=8)))


def test_two_axes_of_a_parameter_on_one_of_the_mesh_are_refused():
    rules = {"heads": "tensor", "head_dim": "tensor"}
    with pytest.raises(ValueError, match=r"attention/.*two of which lie on parallel.tensor"):
        parameter_shardings(shapes(), mesh(MeshShape(tensor=2)), rules=rules)


def test_every_axis_of_the_table_is_some_parameters():
    from jaxblock.axes import PARAMETERS
    from jaxblock.parallel import PARAMETER_AXES

    named = {axis for rule in PARAMETERS for axis in rule.axes or ()}
    assert set(PARAMETER_AXES) <= named
    assert parameter_rule("embedding/table").axes == ("vocab", "width")


@pytest.mark.parametrize(
    ("asked", "devices", "wanted"),
    [
        ({}, 1, MeshShape()),
        ({}, 8, MeshShape(data=8)),
        ({"fsdp": 4}, 8, MeshShape(data=2, fsdp=4)),
        ({"replica": 2, "data": 1, "fsdp": 2, "tensor": 2}, 8, MeshShape(2, 1, 2, 2)),
        ({"data": 2}, 8, MeshShape(data=2)),
    ],
)
def test_data_takes_what_the_other_sizes_leave(asked, devices, wanted):
    found = mesh_shape(**{"replica": 1, "data": None, "fsdp": 1, "tensor": 1, **asked}, devices=devices)
    assert found == wanted


@pytest.mark.parametrize(
    ("asked", "processes", "words"),
    [
        ({"tensor": 3}, 1, "take 3 devices, and there are 8"),
        ({"data": 16}, 1, "take 16 devices, and there are 8"),
        ({"data": 2}, 2, "take 2 devices, and there are 8"),
        ({"fsdp": 0}, 1, "parallel.fsdp is 0"),
    ],
)
def test_sizes_that_do_not_fit_the_devices_are_refused(asked, processes, words):
    with pytest.raises(ValueError, match=words):
        mesh_shape(
            **{"replica": 1, "data": None, "fsdp": 1, "tensor": 1, **asked}, devices=8, processes=processes
        )


@pytest.mark.parametrize("name", ["replica", "fsdp", "tensor"])
def test_pmap_splits_rows_alone(name):
    with pytest.raises(ValueError, match=f'parallel.form is "pmap".*parallel.{name} is 2'):
        ParallelConfig(form="pmap", **{name: 2})
    assert ParallelConfig(form="pmap", data=2).data == 2
