"""The claim of seed 001 on a mixture of experts."""

import json

import jax

from jaxblock import Decoder, cli
from jaxblock.axes import path_name
from tests.small import config, tokens


def shapes(**changes):
    params = jax.eval_shape(Decoder(config(**changes)).init, jax.random.key(0), tokens())["params"]
    return {path_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def test_s1_60_experts_swap_only_the_feed_forward_and_count_twice(capsys):
    dense, mixture = shapes(), shapes(experts="dropless(experts=4, active=1)")
    assert {name for name in dense if name not in mixture} == {
        name for name in dense if name.startswith("blocks/feed_forward/")
    }
    assert {name for name in mixture if name not in dense} == {
        name for name in mixture if name.startswith("blocks/experts/")
    }
    assert all(mixture[name] == shape for name, shape in dense.items() if name in mixture)

    def count(*arguments):
        assert cli.main(["count", "--json", *arguments]) == 0
        return json.loads(capsys.readouterr().out)["parameters"]

    plain, found = count(), count("--model.experts", "dropless(experts=4, active=1)")
    feed_forwards, routers = 3 * plain["per_block"]["feed_forward"], 3 * 128 * 4  # 3 blocks of width 128
    assert plain["total"] == plain["active"]
    assert found["active"] == plain["total"] + routers
    assert found["total"] == found["active"] + 3 * feed_forwards  # of four experts three are idle
