"""What every probe says on 8 devices; run by test_equal_everywhere.py, which has them simulated. Prints JSON."""

import json
import sys
import warnings

import jax
import numpy as np

from jaxblock.parallel import data_mesh, replicate, shard_batch
from tests.probes.every_probe import batch, every_probe, model_config
from tests.small import built


def measured(residual: str, *, lenses: bool) -> dict:
    """Return every probe's numbers, the batch by rows on 8 devices, and where things lie."""
    of, mesh = model_config(residual), data_mesh()
    shards = shard_batch(batch(), mesh)
    found = jax.jit(every_probe(of, lenses=lenses))(replicate(built(of)[1], mesh), *shards)
    return {
        "found": jax.tree.map(lambda x: np.asarray(x, np.float64).tolist(), found),
        "devices": sorted({len(x.sharding.device_set) for x in jax.tree.leaves((shards, found))}),
        "rows": [shard.data.shape[0] for shard in shards[0].addressable_shards],
    }


def main() -> None:
    warnings.simplefilter("error")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_default_matmul_precision", "highest")
    lenses = sys.argv[1] == "lenses"
    print(json.dumps({residual: measured(residual, lenses=lenses) for residual in sys.argv[2:]}))


if __name__ == "__main__":
    main()
