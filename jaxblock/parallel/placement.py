"""Where a run's state and batches lie, and what compiles its functions for that: one interface, three placements.

    OneDevice   everything on the default device, nothing placed by hand
    OnMesh      a mesh: state by the rules table, batches by rows, each process reading its own
    Mapped      `jax.pmap` over the devices of one process: state whole on each, batches by rows

A trainer asks for a placement and knows no device. Whatever the placement, the numbers are one device's to round-off.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxblock.functional.dropout import ROWS_AXIS
from jaxblock.parallel.meshes import (
    AXES,
    MeshShape,
    make_mesh,
    replicated,
    row_sharding,
)
from jaxblock.parallel.pmap import pmap_program, stack_rows
from jaxblock.parallel.rules import state_shardings, use_mesh
from jaxblock.types import Array, Params

StateT = TypeVar("StateT")


class Rows(Protocol):
    """Global batches by number, pytrees of numpy arrays [B, ...], whole or some of their rows."""

    batch: int
    """B."""

    def __getitem__(self, number: int, /) -> Any: ...

    def rows(self, number: int, rows: Sequence[int], /) -> Any:
        """Return some rows of a batch."""
        ...


class Placement(Protocol):
    """What a trainer asks of the place its arrays lie in."""

    @property
    def words(self) -> str:
        """What a person is told."""
        ...

    @property
    def devices(self) -> int:
        """How many devices compute."""
        ...

    @property
    def rows_axis(self) -> str | None:
        """The mapped axis a step is to sum over; None = the step is written for whole batches."""
        ...

    def like(self, state: StateT, params: Params) -> StateT:
        """Return the shapes of a state, with shardings; `params` are the shapes of its parameters."""
        ...

    def init(self, function: Callable[[Array], StateT], key: Array, *, options: Any) -> StateT:
        """Return `function(key)`, a state, made where it is to lie."""
        ...

    def put(self, state: StateT) -> StateT:
        """Return a state of equal values where it is to lie."""
        ...

    def everywhere(self, x: Array) -> Array:
        """Return an array that is whole on every device, as a key is."""
        ...

    def readable(self, tree: StateT) -> StateT:
        """Return placed arrays as arrays that this process can read; every process must ask for the same ones."""
        ...

    def batch(self, batches: Rows, number: int) -> Any:
        """Return a global batch, placed."""
        ...

    def compile(self, step: Callable[..., Any], state: Any, batch: Any, key: Array) -> Any:
        """Return `(state, batch, key) -> (state, ...)`, compiled; the state is given away where that is possible."""
        ...

    def function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of placed arrays, jitted; every process can read what it returns."""
        ...


class OneDevice:
    """Everything on the default device."""

    words = "one device"
    devices = 1
    rows_axis: str | None = None

    def like(self, state: StateT, params: Params) -> StateT:
        """Return the shapes as they are."""
        return state

    def init(self, function: Callable[[Array], StateT], key: Array, *, options: Any) -> StateT:
        """Return `function(key)`, jitted."""
        return jax.jit(function, compiler_options=options)(key)

    def put(self, state: StateT) -> StateT:
        """Return the state as it is."""
        return state

    def everywhere(self, x: Array) -> Array:
        """Return the array as it is."""
        return x

    def readable(self, tree: StateT) -> StateT:
        """Return the arrays as they are."""
        return tree

    def batch(self, batches: Rows, number: int) -> Any:
        """Return the batch on the host: the program's call moves it."""
        return batches[number]

    def compile(self, step: Callable[..., Any], state: Any, batch: Any, key: Array) -> Any:
        """Return the jitted step, compiled, the state donated."""
        return jax.jit(step, donate_argnums=0).lower(state, batch, key).compile()

    def function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, jitted."""
        return jax.jit(function)


class OnMesh:
    """A mesh of all devices of all processes."""

    rows_axis = None

    def __init__(self, shape: MeshShape):
        self.mesh: Mesh = make_mesh(shape, jax.devices()[: shape.devices])
        self.devices = shape.devices
        sizes = ", ".join(f"{name} {size}" for name, size in zip(AXES, shape, strict=True) if size > 1)
        count = jax.process_count()
        processes = f" of {count} processes" if count > 1 else ""
        idle = "" if shape.devices == jax.device_count() else f" of {jax.device_count()}"
        self.words = f"{shape.devices}{idle} devices{processes}: {sizes}"
        self._shardings: Any = None

    def like(self, state: StateT, params: Params) -> StateT:
        """Return the shapes with the rules table's shardings; asked for first, it decides where states lie."""
        self._shardings = state_shardings(state, params, self.mesh)
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            state,
            self._shardings,
        )

    def init(self, function: Callable[[Array], StateT], key: Array, *, options: Any) -> StateT:
        """Return `function(key)`; each device makes its part."""
        with use_mesh(self.mesh):
            return jax.jit(function, out_shardings=self._shardings, compiler_options=options)(key)

    def put(self, state: StateT) -> StateT:
        """Return the state in its shardings; in each process it is given the same values."""
        return jax.tree.map(_put, state, self._shardings)

    def everywhere(self, x: Array) -> Array:
        """Return the array whole on every device; in each process it is given the same one."""
        return _put(x, replicated(self.mesh))

    def readable(self, tree: StateT) -> StateT:
        """Return the arrays, those that lie on other processes' devices gathered, one by one, on the host."""

        def gather(x: Array) -> Any:
            if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
                return x
            return jax.device_get(jax.jit(lambda x: x, out_shardings=replicated(self.mesh))(x))

        return jax.tree.map(gather, tree)

    def batch(self, batches: Rows, number: int) -> Any:
        """Return the batch by rows; a process reads those of its devices."""
        sharding = row_sharding(self.mesh)
        if jax.process_count() == 1:
            return jax.device_put(batches[number], sharding)
        return _rows_of_process(batches, number, sharding)

    def compile(self, step: Callable[..., Any], state: Any, batch: Any, key: Array) -> Any:
        """Return the jitted step, compiled, the state donated; what it returns besides is whole everywhere."""
        whole = replicated(self.mesh)
        with use_mesh(self.mesh):
            made = jax.eval_shape(step, state, batch, key)
            out = (self._shardings, *(jax.tree.map(lambda _: whole, x) for x in made[1:]))
            program = jax.jit(step, donate_argnums=0, out_shardings=out).lower(state, batch, key).compile()
        return program

    def function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, jitted on the mesh; what it returns is whole everywhere."""
        jitted = jax.jit(function, out_shardings=replicated(self.mesh))

        def run(*arguments: Any) -> Any:
            with use_mesh(self.mesh):
                return jitted(*arguments)

        return run


class Mapped(OneDevice):
    """`jax.pmap` over the devices of one process: a program takes its arguments from wherever they lie."""

    def __init__(self, devices: int, *, pieces: int):
        self.devices = devices
        self.rows_axis = ROWS_AXIS
        self.words = f"{devices} devices, mapped over rows"
        self._pieces = pieces

    def compile(self, step: Callable[..., Any], state: Any, batch: Any, key: Array) -> Any:
        """Return the mapped step, compiled; it takes a batch with all its rows in one axis, and keeps the state."""
        stacked = stack_rows(batch, self.devices, pieces=self._pieces)
        program = pmap_program(step, self.devices).lower(state, stacked, key).compile()
        return _MappedProgram(program, self.devices, self._pieces)


class _MappedProgram(NamedTuple):
    """A compiled program over stacked rows, called with all rows in one axis."""

    program: Any
    devices: int
    pieces: int

    def __call__(self, state: Any, batch: Any, key: Array) -> Any:
        return self.program(state, stack_rows(batch, self.devices, pieces=self.pieces), key)

    def memory_analysis(self) -> Any:
        return self.program.memory_analysis()


def _put(x: Array, sharding: NamedSharding) -> Array:
    """Return an array that every process has, or one that is placed already, in a sharding of all their devices."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_put(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x))
    if jax.process_count() == 1 or x.sharding == sharding:
        return jax.device_put(x, sharding)
    value = jax.device_get(x)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def _rows_of_process(batches: Rows, number: int, sharding: NamedSharding) -> Any:
    """Return a global batch of which this process reads the rows that its devices hold."""
    count = batches.batch
    held = sharding.addressable_devices_indices_map((count,)).values()
    own = sorted({row for index in held for row in range(*_part(index).indices(count))})
    place = {row: at for at, row in enumerate(own)}

    def put(x: Any) -> Array:
        def part(index: tuple[slice, ...] | None) -> Any:
            return x[[place[row] for row in range(*_part(index).indices(count))]]

        return jax.make_array_from_callback((count, *x.shape[1:]), sharding, part)

    return jax.tree.map(put, batches.rows(number, own))


def _part(index: tuple[slice, ...] | None) -> slice:
    """Return which rows an index of an array [B, ...] holds."""
    return index[0] if index else slice(None)
