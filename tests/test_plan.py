"""Plans of runs on absent TPU pods."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from antlm_jax import mesh as mesh_lib
from antlm_jax.commands import plan
from antlm_jax.masks import AttentionMask
from antlm_jax.planning import (
  bundles,
  check,
  compilers,
  estimate,
  hlo,
  places,
  search,
  topology,
)
from antlm_jax.planning.hlo import Collective
from antlm_jax.planning.network import Network
from antlm_jax.runtime import chips
from antlm_jax.training import flops
from tests import helpers, runs
from tests.test_aot import GENERATIONS, needs_libtpu

# A shortened program of the TPU's compiler. It has nested loops of two and
# three passes, and a product with a padded window. It also has a sum that is
# then cut, and an all-gather over two fusions. It updates an array in place,
# and cuts a row from a converted table. Some arrays are outside main memory.
PROGRAM = """\
HloModule step, is_scheduled=true

%inner_test (p.0: (s32[], f32[8,4])) -> pred[] {
  %p.0 = (s32[]{:T(128)}, f32[8,4]{1,0}) parameter(0)
  %three = s32[]{:T(128)} constant(3)
  %i.0 = s32[]{:T(128)} get-tuple-element(%p.0), index=0
  ROOT %lt.0 = pred[]{:T(512)} compare(%i.0, %three), direction=LT
}

%fused_product (a: bf16[2,16,8,1], b: bf16[2,4,8,1]) -> bf16[2,16,2,4] {
  %a = bf16[2,16,8,1]{1,2,3,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[2,4,8,1]{2,1,0,3:T(8,128)(2,1)} parameter(1)
  ROOT %conv = bf16[2,16,2,4]{1,3,2,0:T(8,128)(2,1)} convolution(%a, %b), window={size=1x2 pad=0_0x1_1 rhs_reversal=0x1}, dim_labels=0bf1_1oi0->0b1f
}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%cut (whole: f32[8,4]) -> f32[4,4] {
  %whole = f32[8,4]{1,0} parameter(0)
  %reduced = f32[8,4]{1,0} all-reduce(%whole), channel_id=1, replica_groups={{0,2},{1,3}}, to_apply=%add
  %zero.0 = s32[] constant(0)
  ROOT %mine = f32[4,4]{1,0} dynamic-slice(%reduced, %zero.0, %zero.0), dynamic_slice_sizes={4,4}
}

%inner_body (p.1: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %p.1 = (s32[]{:T(128)}, f32[8,4]{1,0}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%p.1), index=0
  %i.copy = s32[]{:T(128)} copy(%i.1)
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)S(4)} add(%i.copy, %one)
  %x.1 = f32[8,4]{1,0} get-tuple-element(%p.1), index=1
  %scatter.1 = f32[4,4]{1,0} fusion(%x.1), kind=kCustom, calls=%cut
  ROOT %out.1 = (s32[]{:T(128)}, f32[8,4]{1,0}) tuple(%next, %x.1)
}

%start (shard: bf16[4,4]) -> (bf16[4,4], bf16[16,4], u32[]) {
  %shard = bf16[4,4]{1,0} parameter(0)
  %gathered.0 = bf16[16,4]{1,0} all-gather(%shard), channel_id=2, replica_groups=[1,4]<=[4], dimensions={0}, backend_config={"async_collective_fusion_config":{"flag_start":"-1"}}
  ROOT %begun = (bf16[4,4]{1,0}, bf16[16,4]{1,0}, u32[]{:S(2)}) custom-call(%gathered.0), custom_call_target="AsyncCollectiveStart"
}

%done (shard.2: bf16[4,4], whole.2: bf16[16,4]) -> bf16[16,4] {
  %shard.2 = bf16[4,4]{1,0} parameter(0)
  %whole.2 = bf16[16,4]{1,0} parameter(1)
  %gathered.2 = bf16[16,4]{1,0} all-gather(%shard.2), channel_id=2, replica_groups=[1,4]<=[4], dimensions={0}, backend_config={"async_collective_fusion_config":{"flag_start":"2"}}
  ROOT %ended = bf16[16,4]{1,0} custom-call(%shard.2, %whole.2, %gathered.2), custom_call_target="AsyncCollectiveDone"
}

%update (all: f32[100,4], row: f32[1,4], at: s32[]) -> f32[100,4] {
  %all = f32[100,4]{1,0} parameter(0)
  %row = f32[1,4]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  ROOT %updated = f32[100,4]{1,0} dynamic-update-slice(%all, %row, %at, %zero.1)
}

%row (half: bf16[100,4], at.1: s32[]) -> f32[1,4] {
  %half = bf16[100,4]{1,0} parameter(0)
  %at.1 = s32[] parameter(1)
  %wide = f32[100,4]{1,0} convert(%half)
  %flat = f32[100,4]{1,0} bitcast(%wide)
  %zero.4 = s32[] constant(0)
  ROOT %cut.1 = f32[1,4]{1,0} dynamic-slice(%flat, %at.1, %zero.4), dynamic_slice_sizes={1,4}
}

%outer_test (p.2: (s32[], f32[8,4])) -> pred[] {
  %p.2 = (s32[]{:T(128)}, f32[8,4]{1,0}) parameter(0)
  %i.2 = s32[]{:T(128)} get-tuple-element(%p.2), index=0
  %ten = s32[]{:T(128)} constant(10)
  ROOT %lt.1 = pred[]{:T(512)} compare(%i.2, %ten), direction=LT
}

%outer_body (p.3: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %p.3 = (s32[]{:T(128)}, f32[8,4]{1,0}) parameter(0)
  %i.3 = s32[]{:T(128)} get-tuple-element(%p.3), index=0
  %five = s32[]{:T(128)} constant(5)
  %next.3 = s32[]{:T(128)} add(%five, %i.3)
  %x.3 = f32[8,4]{1,0} get-tuple-element(%p.3), index=1
  %zero.3 = s32[] constant(0)
  %init.3 = (s32[]{:T(128)}, f32[8,4]{1,0}) tuple(%zero.3, %x.3)
  %while.3 = (s32[]{:T(128)}, f32[8,4]{1,0}) while(%init.3), condition=%inner_test, body=%inner_body
  %x.4 = f32[8,4]{1,0} get-tuple-element(%while.3), index=1
  ROOT %out.3 = (s32[]{:T(128)}, f32[8,4]{1,0}) tuple(%next.3, %x.4)
}

ENTRY %main (x: f32[8,4], a.1: bf16[2,16,8,1]) -> f32[8,4] {
  %x.5 = f32[8,4]{1,0} parameter(0)
  %left = bf16[2,16,8,1]{1,2,3,0:T(8,128)S(1)} parameter(1)
  %right = bf16[2,4,8,1]{2,1,0,3:T(8,128)S(1)} parameter(2)
  %small = bf16[4,4]{1,0} parameter(3)
  %table = f32[100,4]{1,0} parameter(4)
  %one.row = f32[1,4]{1,0} parameter(5)
  %zero.5 = s32[] constant(0)
  %init.5 = (s32[]{:T(128)}, f32[8,4]{1,0}) tuple(%zero.5, %x.5)
  %while.5 = (s32[]{:T(128)}, f32[8,4]{1,0}) while(%init.5), condition=%outer_test, body=%outer_body
  %product = bf16[2,16,2,4]{1,3,2,0:T(8,128)S(1)} fusion(%left, %right), kind=kOutput, calls=%fused_product
  %begun.5 = (bf16[4,4]{1,0}, bf16[16,4]{1,0}, u32[]{:S(2)}) fusion(%small), kind=kCustom, output_to_operand_aliasing={{0}: (0, {})}, calls=%start
  %part.5 = bf16[4,4]{1,0} get-tuple-element(%begun.5), index=0
  %whole.5 = bf16[16,4]{1,0} get-tuple-element(%begun.5), index=1
  %gathered.5 = bf16[16,4]{1,0} fusion(%part.5, %whole.5), kind=kCustom, output_to_operand_aliasing={{}: (1, {})}, calls=%done
  %table.5 = f32[100,4]{1,0} fusion(%table, %one.row, %zero.5), kind=kLoop, calls=%update
  %begun.6 = ((f32[100,4], f32[1,4], s32[]), f32[100,4]{1,0}, u32[]) fusion-start(%table.5, %one.row, %zero.5), kind=kLoop, calls=%update
  %table.6 = f32[100,4]{1,0} fusion-done(%begun.6), metadata={}
  %half.5 = bf16[100,4]{1,0} parameter(6)
  %row.5 = f32[1,4]{1,0} fusion(%half.5, %zero.5), kind=kLoop, calls=%row
  %scores = f32[8]{0:T(128)S(1)} custom-call(%left), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"cost_estimate":{"flops":"700","transcendentals":"1"}}}
  ROOT %x.6 = f32[8,4]{1,0} get-tuple-element(%while.5), index=1
}
"""  # noqa: E501


def test_what_is_in_a_loop_counts_as_often_as_it_runs():
  counts = hlo.count(PROGRAM)
  # Two passes (0 and 5, below 10) of three each.
  assert counts.collectives == {
    Collective("reduce-scatter", 8 * 4 * 4, (0, 2)): 6,
    Collective("all-gather", 4 * 4 * 4 * 2, (0, 1, 2, 3)): 1,
  }
  assert counts.unknown_loops == 0
  assert counts.stated() == 700


def test_the_work_of_instructions_adds_up():
  # A forecast sums instructions; kernels are counted separately.
  counts = hlo.count(PROGRAM)
  flops, moved = (
    sum(times * getattr(work, name) for work, times in counts.work.items())
    for name in ("flops", "bytes")
  )
  assert flops == counts.flops and 0 < moved == counts.bytes
  assert counts.kernels["scores", 700] == 1


def test_a_window_over_padding_is_not_computed():
  # Rows 2 x 16 of width 8 times heads 2 x 4. One of the window's two positions
  # is always padding.
  assert hlo.count(PROGRAM).flops == 2 * (2 * 16) * 8 * (2 * 4)


def test_bytes_are_those_of_the_main_memory():
  number = 4
  # The copy of the counter, the addition, the sum and its part.
  inner = 2 * number + 2 * number + (8 * 4 + 4 * 4) * 4
  outer = 2 * 3 * inner + 2 * 3 * number
  gathered = (4 * 4 + 16 * 4) * 2
  # Two updates of a row, the second asynchronous; not of all hundred rows.
  updated = 2 * (2 * (1 * 4) * 4 + number)
  row = 2 * (1 * 4) * 4 + number  # not the hundred rows that it converts
  assert hlo.count(PROGRAM).bytes == outer + gathered + updated + row


def test_a_kernels_bundles_are_those_of_its_blocks_and_outputs():
  # Four parts that begin with a branch; two are blocks.
  parts = (3, 40, 50, 4)
  text = "LB: loop body\n" + "".join(
    f"   {line:#x}   : {'>' * (size > 4)} {{ %v = {'sbr.rel' * (not line)} }}\n"
    for size in parts
    for line in range(size)
  )
  listing = bundles.BundleCounts.parse(text)
  assert listing == bundles.BundleCounts(50, 40, output=7, all=97, looped=90)
  assert listing.cycles(2, 3, 5) == 2 * 50 + 3 * 40 + 5 * 7
  assert listing.passes(10) == 10 * 90 + 7  # of a fusion


@pytest.mark.parametrize(
  "written, group",
  [
    ("{{0,4},{1,5}}", (0, 4)),
    ("[4,2]<=[8]", (0, 1)),
    ("[4,2]<=[2,4]T(1,0)", (0, 4)),
    ("mesh['a'=2,'b'=4] {'b'}", (0, 1, 2, 3)),
    ("mesh['a'=2,'b'=4] {'a','b'}", tuple(range(8))),
    ("mesh['a'=2,'b'=4] {'b':(2)2}", (0, 1)),
    ("mesh['a'=2,'b'=4] {'b':(1)2}", (0, 2)),
    ("mesh['a'=1,'b'=2,'c'=4], device_ids=([4,2]T(1,0)) {'b'}", (0, 1)),
  ],
)
def test_groups_are_read_however_they_are_written(written, group):
  text = PROGRAM.replace("{{0,2},{1,3}}", written)
  assert Collective("reduce-scatter", 128, group) in hlo.count(text).collectives


@pytest.mark.parametrize(
  "name, slices, part",
  [
    ("x100:8", 1, "'x100:8': write TPUs (v4:4x4x4 ... h200:8"),
    ("gpu:0", 1, "'gpu:0': write gpu:8"),
    ("h100:16", 1, "'h100:16': write h100:8 (one node of at most 8"),
    ("h100:8x8x8", 1, "write h100:8 "),
    ("v5e:16x16x16", 1, "such as v5e:16x16"),
    ("v5p:99999", 1, "at most 16,384 chips"),
    ("h100:8", 2, "slices=2 is for TPUs: h100:8 includes its nodes"),
    ("gpu:2x8", 2, "slices=2 is for TPUs"),
  ],
)
def test_a_check_knows_which_devices_there_are(name, slices, part):
  """Catches a check that is laxer than `plan` itself."""
  line = runs.told(check.check_launch, "quickstart", {}, name, slices)
  assert all(words in line for words in part.split(" ... ")), line
  # Only a check takes GPUs of an unknown kind.
  assert "unknown" in runs.told(places.parse_topology, "gpu:8")


def test_a_loop_without_a_known_end_counts_once_and_is_told():
  counts = hlo.count(PROGRAM.replace("constant(10)", "parameter(1)"))
  assert counts.unknown_loops == 1
  assert counts.collectives[Collective("reduce-scatter", 128, (0, 2))] == 3


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


def test_products_by_cublas_are_counted():
  """Catches a forecast for a T4 that is faster than its peak."""
  text = """
ENTRY %main (a: f32[2,16,8], b: f32[2,4,8]) -> f32[2,16,4] {
  %a = f32[2,16,8]{2,1,0} parameter(0)
  %b = f32[2,4,8]{2,1,0} parameter(1)
  %call = (f32[2,16,4]{2,1,0}, s8[64]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["2"],"lhs_batch_dimensions":["0"],"rhs_batch_dimensions":["0"]}}}
  ROOT %out = f32[2,16,4]{2,1,0} get-tuple-element(%call), index=0
}
"""  # noqa: E501
  assert hlo.count(text).flops == 2 * (2 * 16 * 4) * 8


def test_products_of_a_compiled_loop_are_counted():
  def run(x, stack):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0]

  shapes = jnp.zeros((16, 32)), jnp.zeros((7, 32, 32))
  compiled = jax.jit(run).lower(*shapes).compile()
  assert hlo.count(compiled.as_text()).flops == 7 * 2 * 16 * 32 * 32


def test_attention_is_counted_apart_by_rows():
  length = 8
  end = np.stack([np.arange(1, 9), np.full(8, 8)]).astype(np.int32)[None]
  mask = AttentionMask(causal=False, k_end=end)
  causal, others = flops.visible_pairs(mask, (1, 2, length))
  assert (causal, others) == (36, 64)
  source = helpers.source("C:M=1:1", rows=helpers.FakeRows(length=16))
  model = helpers.model()
  work = flops.forward_work(model, source[0])
  per_pair = 4 * 2 * 32  # two products, layers, width
  assert work.causal == per_pair * 4 * (16 * 17 / 2)
  assert work.bidirectional == per_pair * 4 * 16**2
  assert flops.train_step(model, source[0]) == 3 * work.total


def test_rows_that_stand_in_are_cut_into_pieces():
  rows = estimate.StandIn(vocab_size=50, seq_len=64, pieces=3, size=100)
  tokens, starts = rows.read(np.arange(100))
  assert tokens.shape == starts.shape == (100, 64)
  assert tokens.min() >= 1 and tokens.max() < 50  # no special tokens
  assert starts[:, 0].all()
  assert np.median(starts.sum(axis=1)) == 3
  again = rows.read(np.array([7]))[1]
  assert (again == starts[7]).all()


SMALL = """
from antlm_jax import config as config_lib

def get_config(arg=""):
  config = config_lib.changes()
  config.curriculum = "30C+70M steps"
  config.model.update(
    layers=2, width=256, mlp_width=512, heads=4, kv_heads=2, max_seq_len=256,
    tied=False, dtype="bfloat16", remat="dots")
  config.train.update(batch_size=16, loss_chunk=64)
  config.eval.rows = 0
  return config
"""


@pytest.fixture
def small(tmp_path):
  """A config file of a small encoder without evaluations."""
  path = tmp_path / "small.py"
  path.write_text(SMALL)
  return str(path)


def pod(small, slices=1, **changes) -> search.Pod:
  devices = topology.topology_devices("v5e:2x2", slices)
  return search.Pod(
    small, {}, devices, **{"vocab_size": 1024, "pieces": 2} | changes
  )


def estimate_first(run):
  return estimate.estimate_program(run, run.batch_kinds()[0])


def planned(small, *words):
  """Runs the command for the small encoder."""
  plan.main([f"--config={small}", "--topology=v5e:2x2", *words])


@needs_libtpu
def test_prepared_data_says_its_vocabulary_and_length(small, prepared):
  run = pod(small).build_run([f"data.path={prepared}"])
  assert run.model.config.vocab_size == 400
  programs = run.batch_kinds()
  assert [(p.name, p.steps) for p in programs] == [("C", 30), ("M", 70)]
  assert programs[0].batch.inputs.shape == (1, 16, 32)
  assert programs[0].batch.mask.k_start is not None  # packed by documents


@pytest.mark.nightly
@needs_libtpu
def test_with_fsdp_the_head_is_gathered_and_its_gradient_summed_but_once(small):
  sent = {}
  for chunk in (64, 512):  # of 1,024 targets
    run = pod(small).build_run(("mesh.fsdp=4", f"train.loss_chunk={chunk}"))
    sent[chunk] = estimate_first(run).collectives
  assert sent[64] and sent[64] == sent[512]


@needs_libtpu
def test_each_kind_of_batch_and_each_evaluation_is_planned(small):
  run = pod(small).build_run(
    ["curriculum=10C+20C:M=1:1+10C+10M steps", "eval.rows=8"]
  )
  named = {p.name: p.steps for p in run.batch_kinds()}
  steps = {"C": 20, "C:M": 20, "M": 10, "eval clm": 0, "eval mlm": 0}
  assert named == steps and list(named) == list(steps)


def test_a_run_is_planned_without_the_model_that_it_starts_from(small):
  """Catches a plan that opens a model of transformers as a run."""
  settings = {"init.checkpoint": "hf://some/model"}
  here = search.Pod(small, settings, jax.devices()[:1], 1024, seq_len=128)
  assert here.build_run().start is None


@pytest.mark.parametrize(
  "curriculum, told", [("3C+1M", True), ("30C+70M steps", False)]
)
def test_an_epoch_without_data_is_told(small, curriculum, told, monkeypatch):
  """Catches hours and a price of epochs whose length nobody knows."""
  settings = {"curriculum": curriculum}
  here = search.Pod(small, settings, jax.devices()[:1], 1024, seq_len=128)
  setup = plan._show_setup(here, here.build_run(), "h100:1", 1)
  monkeypatch.setattr(plan, "estimates_table", lambda programs: "")
  printed = str(plan.Plan(about=setup, steps=4000))
  assert ("each epoch is taken for 1,000 steps" in printed) == told


def test_a_launch_has_the_plugins_of_its_plan(monkeypatch):
  monkeypatch.setenv("ANTLM_PLUGINS", "configs/mine.py")
  about = {"config": "c", "topology": "h100:8", "slices": 1, "overrides": []}
  launched = plan._with_launch(plan.Plan(about=about, steps=1)).launch
  assert "-- \\\n  --plugin=configs/mine.py --config=c" in launched


def test_batches_of_each_size_are_planned_and_counted(small):
  """Catches a large batch whose memory nobody estimates."""
  here = search.Pod(small, {}, jax.devices()[:1], vocab_size=1024, seq_len=128)
  run = here.build_run(
    ["curriculum=8C+12M steps", "train.batch_schedule=32x256@0.5"]
  )
  found = {
    p.name: (p.steps, p.batch.inputs.shape) for p in run.batch_kinds(False)
  }
  late = 10, (1, 32, 256)
  assert found == {
    "C": (8, (1, 16, 128)),
    "M": (2, (1, 16, 128)),
    "M of 256, 32 rows": late,
  }
  for changes in ({}, {"growth": 0.25}):
    order = dataclasses.replace(run.order, **changes)
    batches = dataclasses.replace(run.batches, order=order)
    grown = dataclasses.replace(run, batches=batches, order=order)
    each = [flops.train_step(run.model, run.batches[s]) for s in range(20)]
    sizes = [order.batch_size(s) / run.order.batch_size(s) for s in range(20)]
    for begin in (0, 9, 15):
      exact = np.dot(each[begin:], sizes[begin:])
      counted = search.train_flops(grown, begin, {})
      assert counted == pytest.approx(exact, rel=0.02)


@needs_libtpu
@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_generation_is_known(generation):
  devices = topology.topology_devices(GENERATIONS[generation])
  chip = chips.chip_of(devices[0])
  shown = [d for d in devices if d.coords == devices[0].coords]
  assert len(shown) == chip.devices
  kind = devices[0].device_kind
  known = max((k for k in chips.CHIPS if kind.startswith(k)), key=len)
  assert chip.flops * len(shown) == chips.CHIPS[known].flops
  assert chip.memory > 2**33 and chip.bandwidth > 5e11 and chip.link > 2e10


@needs_libtpu
@pytest.mark.parametrize("shape", ["v5p:4x4x8", "v5e:16x16"])
def test_a_mesh_may_split_the_sides_of_a_slice(shape):
  devices = topology.topology_devices(shape)
  for fsdp, tensor in ((2, 1), (16, 2), (64, 1)):
    mesh = mesh_lib.Mesh(fsdp=fsdp, tensor=tensor).build(devices)
    assert set(mesh.devices.flat) == set(devices)
    assert mesh.shape["fsdp"] == fsdp and mesh.shape["tensor"] == tensor


@needs_libtpu
def test_slices_are_apart_along_data_alone():
  mesh = mesh_lib.Mesh(fsdp=4).build(topology.topology_devices("v5e:4x4", 2))
  for rows in mesh.devices:
    assert len({device.slice_index for device in rows.flat}) == 1
  assert "not a multiple of the 2 slices" in runs.told(
    mesh_lib.Mesh(1, -1).build, topology.topology_devices("v5e:4x4", 2)
  )


@needs_libtpu
def test_a_collective_takes_the_links_that_its_group_spans():
  devices = topology.topology_devices("v5p:4x4x8")
  mesh = mesh_lib.Mesh(fsdp=16).build(devices)
  network = Network(mesh)
  places = [tuple(d.coords) for d in mesh.devices.flat]
  at = {place: i for i, place in enumerate(places)}
  ring = tuple(at[0, 0, z] for z in range(8))
  line = tuple(at[0, 0, z] for z in range(4))
  plane = tuple(at[x, y, 0] for x in range(4) for y in range(4))
  for group, rate in ((ring, 200e9), (line, 100e9), (plane, 400e9)):
    n = len(group)
    gather = Collective("all-gather", 10**9, group)
    assert np.isclose(network.seconds(gather), 1e9 * (n - 1) / n / rate)
    reduce = dataclasses.replace(gather, kind="all-reduce")
    assert np.isclose(network.seconds(reduce), 2 * network.seconds(gather))
  permute = Collective("collective-permute", 10**9, line[:2])
  assert np.isclose(network.seconds(permute), 1e9 / 100e9)
  fsdp = tuple(range(16))
  assert network.axes(fsdp) == ("fsdp",)
  assert network.axes((0, 16, 32)) == ("data",)
  across = Collective("all-reduce", 10**9, slices=2)
  assert network.axes(across.group) == ("slices",)
  assert np.isclose(network.seconds(across), 1e9 / (50e9 / 8))


def sent(found) -> float:
  return sum(c["sent"] for c in found.collectives)


@pytest.mark.nightly
@needs_libtpu
def test_a_loop_of_layers_counts_as_much_as_layers_one_by_one(small):
  """Scanned layers, two microbatches and chunks of the loss: loops in loops."""
  settings = ["mesh.fsdp=2", "train.microbatches=2", "curriculum=10C steps"]
  runs = {
    way: pod(small).build_run([*settings, f"model.scan_layers={way}"])
    for way in ("yes", "no")
  }
  scanned, unrolled = (estimate_first(run) for run in runs.values())
  assert abs(scanned.executed / unrolled.executed - 1) < 0.01
  # In unrolled layers, the backward pass follows the last forward pass. XLA
  # then gathers the last layer's bfloat16 weights only once.
  shapes = runs["yes"].model.shapes
  weights = [p for p in shapes if re.fullmatch("blocks/.*/kernel", p)]
  layer = sum(shapes[path].size for path in weights) / 2
  spared = 2 * (2 * layer) / 2  # two microbatches; half of the weights is local
  assert np.isclose(sent(scanned), sent(unrolled) + spared, rtol=0.001)
  assert abs(scanned.moved / unrolled.moved - 1) < 0.25


@pytest.mark.slow
@needs_libtpu
def test_a_plan_is_printed_and_written(small, tmp_path, capsys):
  output = tmp_path / "plans/plan.json"
  words = "--vocab_size=1024", "--pieces=2", f"--output={output}", "--where"
  planned(small, *words, "--config.mesh.fsdp=4")
  printed = capsys.readouterr().out
  for said in (
    "4 devices: data=1, fsdp=4, tensor=1",
    "no data.path: 1,024 tokens, rows of 256 in 2",
    "causal attention",
    "all-gather over fsdp",
    "best MFU",
    "100 steps:",
    "by the forecast",
    "ms per step (products)",
  ):
    assert said in printed
  written = json.loads(output.read_text())
  causal, masked = written["programs"]
  assert (causal["name"], masked["name"]) == ("C", "M")
  assert causal["work"]["bidirectional"] == 0 < causal["work"]["causal"]
  assert masked["work"]["causal"] == 0 < masked["work"]["bidirectional"]
  model = written["parameters"]
  for program in written["programs"]:
    # Parameters and two moments in float32 over four devices, and the batch.
    state = 12 * model / 4
    assert state < program["memory"]["arguments"] < 1.1 * state + 2**17
    assert 0 < program["mfu"] < 1
    assert program["step_seconds"] == program["seconds"][program["bound"]]
    # A forecast assumes no overlap and less than peak rates.
    assert program["step_seconds"] < program["forecast"]["seconds"]
    parts = program["forecast"]["parts"]
    # The compiled program still has the scopes of the model and the step.
    assert {"head", "MLP", "projections", "norms", "optimizer"} <= set(parts)
    assert parts["attention kernel"]["seconds"] > 0
    seconds = sum(part["seconds"] for part in parts.values())
    assert np.isclose(seconds, program["forecast"]["seconds"])
    assert parts["rest"]["seconds"] < 0.2 * seconds
    assert all(p["products"] <= p["seconds"] for p in parts.values())
    needed = program["work"]["blocks"] + program["work"]["head"]
    assert 4 * program["executed"] > needed
  assert output.with_suffix(".png").stat().st_size > 10_000
  # Compare the plan with itself.
  planned(small, *words[:2], "--config.mesh.fsdp=4", f"--before={output}")
  lines = capsys.readouterr().out.splitlines()
  head = next(x for x in lines if x.startswith("ms per step"))
  assert head.split()[4:] == ["C", "before", "M", "before", "C", "M"]
  last = next(x for x in lines if x.startswith("all "))
  times = re.findall(r"[\d.]+ \([\d.]+\)", last)
  assert times[:2] == times[2:]


@pytest.mark.nightly
@pytest.mark.slow
@needs_libtpu
def test_products_are_those_of_the_cost_analysis_without_loops(small):
  settings = [
    "curriculum=10C steps",
    "model.scan_layers=no",
    "train.loss_chunk=4096",
    "model.width=1024",
    "model.mlp_width=4096",
    "model.max_seq_len=1024",
  ]
  run = pod(small, vocab_size=8192).build_run(settings)
  shapes = mesh_lib.abstract(run.mesh, run.batch_kinds()[0].batch)
  lowered = topology.lower(run.step, run.mesh, shapes)
  compiled = topology.compile_lowered(lowered)
  text = compiled.as_text()
  counts, said = hlo.count(text), compiled.cost_analysis()
  assert "while(" not in text
  ours = counts.flops + counts.stated()
  # The cost analysis also counts elementwise operations.
  assert 0 <= said["flops"] / ours - 1 < 0.02
  everywhere = hlo.count(re.sub(r"S\(\d+\)", "", text))
  assert abs(everywhere.bytes / said["bytes accessed"] - 1) < 0.3


@needs_libtpu
def test_devices_sum_gradients_once_a_step(small):
  """Catches a sum in each microbatch: XLA must see a sum that only adds up."""
  settings = ["train.microbatches=4", "train.loss_chunk=0", "model.tied=true"]
  run = pod(small, pieces=1).build_run([*settings, "curriculum=10C steps"])
  (found,) = estimate_first(run).collectives
  assert (found["kind"], found["axes"]) == ("all-reduce", "data")
  # Float32 gradients. The output layer's have their own sum, in addition to
  # those of the embeddings.
  shapes = run.model.shapes
  most = 4 * (run.model.size + shapes["embedding"].size)
  assert 4 * run.model.size <= found["bytes"] < 1.01 * most


@pytest.mark.slow
@needs_libtpu
def test_between_slices_there_are_sums_alone(small):
  run = pod(small, slices=2).build_run(["mesh.fsdp=2", "curriculum=10C steps"])
  assert dict(run.mesh.shape) == {"data": 4, "fsdp": 2, "tensor": 1}
  kinds = {
    c["kind"] for c in estimate_first(run).collectives if c["axes"] == "slices"
  }
  assert kinds == {"all-reduce"}


def test_the_compilers_errors_are_read():
  used = (
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in"
    " memory space hbm. Used 20.50G of 15.75G hbm. Exceeded hbm capacity by"
    " 4.75G."
  )
  memory = estimate.parse_memory_error(used, arguments=2**30)
  assert (memory.needed, memory.limit) == (20.5 * 2**30, 15.75 * 2**30)
  temporaries = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required"
    " for HLO temporaries (22.00G) exceeds available HBM (15.75G)."
  )
  huge = used.replace("20.50G", "20.50P")
  assert estimate.parse_memory_error(huge, 0).needed == 20.5 * 2**50
  memory = estimate.parse_memory_error(temporaries, arguments=2**30)
  assert memory.needed == 23 * 2**30 and not memory.fits
  assert estimate.parse_memory_error("INTERNAL: it broke", 0) is None


@needs_libtpu
def test_what_saves_memory_is_tried_in_order(small):
  run = pod(small).build_run()
  state = 12 * run.model.size
  little = list(search.settings_that_save(run, state // 4))
  assert little[0] == ("mesh.data=-1", "mesh.fsdp=2")
  much = list(search.settings_that_save(run, 10 * state))
  assert much[0] == ("mesh.data=-1", "mesh.fsdp=4")
  assert [s[2:] for s in much[1:]] == [
    ("model.remat=block",),
    ("model.remat=block", "train.microbatches=2"),
    ("model.remat=block", "train.microbatches=4"),
  ]


@needs_libtpu
def test_what_was_tried_is_told_where_nothing_fits(small, monkeypatch, capsys):
  def too_much(run, chosen, **_):
    memory = estimate.Memory(2**34, 2**36, 0, 2**36)
    for found in canned(run, chosen):
      yield dataclasses.replace(found, memory=memory, seconds={})

  for module in (plan, search):
    monkeypatch.setattr(module, "estimate_all", too_much)
  with pytest.raises(SystemExit) as end:
    planned(small)
  assert end.value.code == 1
  printed = capsys.readouterr().out
  assert "too much by" in printed
  assert "nor with any setting tried" in printed
  assert "--config.train.microbatches=4" in printed


@pytest.mark.nightly
@pytest.mark.slow
@needs_libtpu
def test_what_does_not_fit_fits_with_what_is_advised(small, capsys):
  model = "--config.model.width=1024", "--config.model.mlp_width=262144"
  words = "--vocab_size=1024", "--config.curriculum=10C steps", *model
  with pytest.raises(SystemExit) as end:
    planned(small, *words)
  assert end.value.code == 1
  printed = capsys.readouterr().out
  assert "too much by" in printed
  flags = re.search(r"does with\n  (.*)", printed)[1].split()
  assert "--config.mesh.fsdp=4" in flags
  planned(small, *words, *flags)
  assert "10 steps:" in capsys.readouterr().out


def canned(run, chosen):
  """Returns estimates whose state fits from four on, and `tensor` is slow."""
  mesh, count = run.mesh.shape, run.config.train.microbatches
  needed = 2**36 // (mesh["fsdp"] * mesh["tensor"] * count)
  for program in chosen:
    yield estimate.Estimate(
      program.name,
      program.steps,
      program.batches,
      16,
      256,
      run.mesh.size,
      1e14,
      "pallas",
      flops.Work(1e12, 0, 0, 0),
      1.0,
      estimate.Memory(2**34, needed, 0, needed),
      seconds={"compute": 1e-2 * count, "network": 1e-2 * mesh["tensor"]},
    )


@needs_libtpu
def test_of_microbatches_a_sweep_takes_the_fewest_that_fit(small, monkeypatch):
  monkeypatch.setattr(search, "estimate_all", canned)
  asked = pod(small)
  rows = search.sweep_meshes(asked, asked.build_run(), budget=60)
  assert [(*row["mesh"].values(), row["microbatches"]) for row in rows] == [
    (1, 4, 1, 1),
    (2, 2, 1, 2),
    (2, 1, 2, 2),
    (1, 2, 2, 1),
    (4, 1, 1, 4),
    (4, 1, 1, 1),
    (4, 1, 1, 2),
    (2, 2, 1, 1),
    (2, 1, 2, 1),
  ]
  assert [row["fits"] for row in rows] == [True] * 5 + [False] * 4
  assert np.isclose(rows[0]["mfu"], 1e12 / (4 * 1e14 * 1e-2))
  table = plan.sweep_table(rows).splitlines()
  assert "data=1 fsdp=4 tensor=1" in table[1] and "25.0%" in table[1]
  assert "does not fit" in table[-1]
  assert not search.sweep_meshes(asked, asked.build_run(), budget=-1)


@needs_libtpu
@pytest.mark.parametrize(
  "words, said",
  [
    ("--topology=v5e:3x7", "'v5e:3x7' is not a TPU topology"),
    ("--config.mesh.fsdp=3", "fit 4 devices"),
    ("--config.train.batch_size=6", "=6 is not a positive multiple of"),
    ("--seq_len=512", "over model.max_seq_len=256"),
    ("--config.data.path=nowhere", "nowhere is not a prepared folder"),
    ("--mesh=4", "unknown argument '--mesh=4'"),
    ("--topology=v4:2x2x1 --slices=2", "is not published"),
    ("--output=.", "cannot write .: not a regular"),
    ("--vocab_size=999999999999", "is not at least 2"),
    ("--config.train.batch_size=10000000", "rows of 256 tokens are too many"),
    ("--config.model.max_seq_len=1000000000", "1000000000 tokens are too many"),
    ("--config.train.batch_schedule=4x256@0.5", "e.g. --seq_len=128"),
  ],
)
def test_bad_input_is_told_before_anything_is_compiled(
  small, words, said, monkeypatch
):
  monkeypatch.setattr(topology, "lower", None)
  assert said in runs.told(planned, small, *words.split())


def test_without_libtpu_it_is_said_how_to_get_it(small, monkeypatch):
  monkeypatch.setattr(compilers, "libtpu", lambda: None)
  assert "setup.sh libtpu" in runs.told(planned, small)
