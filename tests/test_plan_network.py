"""Collectives of compiled programs: their number, and those that overlap."""

from antlm_jax.planning import estimate, hlo, search, topology
from antlm_jax.planning.hlo import Collective
from tests.test_aot import needs_libtpu
from tests.test_plan import SMALL

CARRIED = """
%start (shard: bf16[4,4]) -> (bf16[4,4], bf16[16,4], u32[]) {
  %shard = bf16[4,4]{1,0} parameter(0)
  %gathered = bf16[16,4]{1,0} all-gather(%shard), replica_groups=[1,4]<=[4], dimensions={0}, backend_config={"async_collective_fusion_config":{"flag_start":"-1"}}
  ROOT %begun = (bf16[4,4]{1,0}, bf16[16,4]{1,0}, u32[]{:S(2)}) custom-call(%gathered), custom_call_target="AsyncCollectiveStart"
}

%step (a: bf16[16,8], b: bf16[8,4], shard.1: bf16[4,4]) -> (bf16[16,4], bf16[16,4]) {
  %a = bf16[16,8]{1,0} parameter(0)
  %b = bf16[8,4]{1,0} parameter(1)
  %shard.1 = bf16[4,4]{1,0} parameter(2)
  %gathered.1 = bf16[16,4]{1,0} all-gather(%shard.1), replica_groups=[1,4]<=[4], dimensions={0}, backend_config={"async_collective_fusion_config":{"flag_start":"1"}}
  %product = bf16[16,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %both = (bf16[16,4]{1,0}, bf16[16,4]{1,0}) tuple(%product, %gathered.1)
}

ENTRY %main (x: bf16[4,4], y: bf16[16,8], z: bf16[8,4]) -> bf16[16,4] {
  %x = bf16[4,4]{1,0} parameter(0)
  %y = bf16[16,8]{1,0} parameter(1)
  %z = bf16[8,4]{1,0} parameter(2)
  %first = bf16[16,4]{1,0} all-gather(%x), replica_groups=[1,4]<=[4], dimensions={0}
  %begun.1 = (bf16[4,4]{1,0}, bf16[16,4]{1,0}, u32[]{:S(2)}) fusion(%x), kind=kCustom, calls=%start
  %part = bf16[4,4]{1,0} get-tuple-element(%begun.1), index=0
  %alone = bf16[16,4]{1,0} dot(%y, %z), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %carrier = (bf16[16,4]{1,0}, bf16[16,4]{1,0}) fusion(%y, %z, %part), kind=kOutput, calls=%step
  ROOT %result = bf16[16,4]{1,0} get-tuple-element(%carrier), index=0
}
"""  # noqa: E501


def test_the_network_of_a_carried_collective_is_hidden():
  """Catches a forecast that adds collectives that products carry."""
  counts = hlo.count(CARRIED)
  gather = Collective("all-gather", 16 * 4 * 2, (0, 1, 2, 3))
  assert counts.collectives == {gather: 2} and counts.carried == {gather: 1}
  work = {what.code: what.carries for what in counts.work if what.flops}
  assert work == {"dot": False, "fusion": True}


@needs_libtpu
def test_devices_sum_gradients_once_a_step(tmp_path):
  """Catches a sum in each microbatch: XLA must see a sum that only adds up."""
  config = tmp_path / "small.py"
  config.write_text(SMALL)
  devices = topology.topology_devices("v5e:2x2")
  settings = ["train.microbatches=4", "train.loss_chunk=0", "model.tied=true"]
  settings += ["curriculum=10C steps"]
  run = search.Pod(str(config), {}, devices, vocab_size=1024).run(settings)
  (found,) = estimate.estimate_program(run, run.programs()[0]).collectives
  assert (found["kind"], found["axes"]) == ("all-reduce", "data")
  # Float32 gradients. The output layer's have their own sum, in addition to
  # those of the embeddings.
  shapes = run.model.shapes
  most = 4 * (run.model.size + shapes["embedding"].size)
  assert 4 * run.model.size <= found["bytes"] < 1.01 * most
