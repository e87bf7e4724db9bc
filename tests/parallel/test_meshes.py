"""The data mesh and what is placed on it; what needs more than one device is in test_eight_devices.py."""

import ast

import chex
import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxblock.parallel import data_mesh, pmap_mean_and_gradient, replicate, rows_per_device, shard_batch
from tests.parallel.ragged import ragged_batch
from tests.test_imports import PACKAGE, python_files

PMAP_USER = "parallel/pmap.py"


def test_the_mesh_is_automatic():
    """With JAX's default, explicit axes, every function would have to name shardings."""
    mesh = data_mesh()
    assert (mesh.axis_names, mesh.axis_types) == (("data",), (AxisType.Auto,))
    assert mesh.devices.tolist() == jax.devices()


def test_placing_changes_no_value():
    batch, mesh = ragged_batch(4), data_mesh(jax.devices()[:1])
    assert batch.segments_BT is None
    chex.assert_trees_all_equal(shard_batch(batch, mesh), jax.tree.map(np.asarray, batch))
    chex.assert_trees_all_equal(replicate({"scale": np.ones(3)}, mesh), {"scale": np.ones(3, np.float32)})


@pytest.mark.parametrize(("rows", "devices"), [(6, 4), (3, 8), (0, 1)])
def test_b107_rows_that_do_not_divide_by_the_devices_are_refused(rows, devices):
    with pytest.raises(ValueError, match=f"has {rows} rows and there are {devices} devices"):
        rows_per_device(ragged_batch(rows), devices)
    assert rows_per_device(ragged_batch(24), devices) == 24 // devices


@pytest.mark.parametrize(
    "batch", [(), (np.ones(()),), (np.ones((4, 2)), np.ones((2, 4)))], ids=["nothing", "scalar", "ragged"]
)
def test_arrays_without_a_common_number_of_rows_are_refused(batch):
    with pytest.raises(ValueError, match="all must have the same number of rows"):
        rows_per_device(batch, 1)


@pytest.mark.parametrize("devices", [0, 1.0, True, 2**20])
def test_a_number_of_devices_that_there_is_not_is_refused(devices):
    with pytest.raises(ValueError, match=f"devices is {devices}; it must be a whole number of at"):
        pmap_mean_and_gradient(lambda params, batch: (params, batch), devices)


def pmap_users() -> set[str]:
    """Return the files of the package that name `pmap`, as an attribute or in an import."""
    named = {
        file: {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        | {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
        for file in python_files(PACKAGE)
        for tree in [ast.parse(file.read_text(encoding="utf-8"))]
    }
    return {file.relative_to(PACKAGE).as_posix() for file, names in named.items() if "pmap" in names}


def test_pmap_is_used_in_one_module():
    """JAX keeps it for old code only; the day it goes, one file changes."""
    assert pmap_users() == {PMAP_USER}
