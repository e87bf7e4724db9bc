import time, cProfile, pstats, jax
import pytest
from jaxblock.cli import main
TINY = ["--model.depth","1","--model.width","16","--model.heads","2","--model.context","16","--data.batch","4","--run.steps","6","--run.log_every","2","--run.evaluate_every","3","--run.checkpoint_every","3","--sample.length","8"]
@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("cache")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
@pytest.mark.parametrize("k",[0,1,2])
def test_a(tmp_path,k,capfd):
    f=tmp_path/"t.txt"; f.write_bytes(b"the quick brown fox jumps over the lazy dog. "*60)
    t=time.time(); c=time.process_time()
    p=cProfile.Profile()
    if k==2: p.enable()
    code=main(["train",*TINY,"--data.path",str(f),"--run.dir",str(tmp_path/"r")])
    if k==2: p.disable()
    with capfd.disabled():
        print(time.time()-t, time.process_time()-c,  code)
        print(capfd.readouterr().err[-900:])
        if k==2:
            pstats.Stats(p).sort_stats("cumtime").print_stats(45)
