#include <fmt/format.h>

#include <string>

#include "program/schedule_fields.h"

// docs/schedule.md.
namespace uniep {
namespace {

constexpr const char* kHead = R"(# Schedule reference

<!-- Generated: uniep schedule --reference > docs/schedule.md -->

A Schedule says how one direction of a layer is mapped onto a machine. No field of it changes a bit of the result; what
does is in Numerics. Give any part of it; the rest is filled so that the whole is legal for the shape and the machine.

Three ways to write it:

- `auto`, or nothing: every field is open.
- `fusion=layer,comm.where=sms,tile.n=128`
- `{"fusion": "layer", "comm.where": "sms", "tile.n": 128, "dispatch.dedup": true}`: flat JSON; `true` and `false` stand for
  `on` and `off`.

A field may be given once. Unknown fields and illegal values are refused, with the legal ones named.

The first GEMM is FC1 in forward and dgrad FC2 in backward; the second GEMM is FC2 and dgrad FC1. A worker is an SM on the
cuda engine and a thread on the cpu engine. El is the number of local experts of a rank.

## Fields

The three columns of defaults show what open fields become for H 7168, I 2048, E 256, K 8 on 8 ranks with 132 workers
(cuda, forward and backward) and 8 workers (cpu). Backward on cuda runs dgrad FC2 with `tile.dgrad_fc2.n=192`.

| field | values | cuda, forward | cuda, backward | cpu | what it does | strategies that it covers |
|---|---|---|---|---|---|---|
)";

constexpr const char* kStages = R"(
## Tiles by stage

Every `tile.` field can be given to one stage alone, which then does not take the common value: `tile.fc1.n=128`. The
stages are, in forward, `fc1` and `fc2`; in backward `dgrad_fc2`, `dgrad_fc1`, `wgrad_fc2` and `wgrad_fc1`. A direction
ignores the other one's stages. The values are those of the table above, but for `tile.fc1.n`: 128 or 256. A stage without
a value of its own prints none.

)";

constexpr const char* kRules = R"(## What is filled

- What belongs to the order of tiles follows from the machine and the shape:

  | | order.interleave | queue | order.experts_per_wave | order.raster | combine.column_chunks |
  |---|---|---|---|---|---|
  | cpu | mixed | static | 2 | 8 | 1 |
  | cuda, I W / (W - 1) below 1500 (from eight ranks on 1800): the links take as long as the gemms | mixed | dynamic | El / 16 | 8 | 1 |
  | cuda, else | phased | dynamic | 16 | 16 | 4 |

  But order.interleave is `phased` without fusion=layer, order.experts_per_wave 1 to El (El / 16 wherever cuda runs mixed
  waves), and combine.column_chunks halved until its chunks are whole tiles of 256 columns, at least four; 1 with
  fusion=none or combine.transport=staged.
- Backward on cuda: `fusion` becomes `layer` where that goes with all else that is given, and `pairs` where it does not, or with a given
  backward.wgrad=after; order.experts_per_wave becomes El, order.raster 16 and combine.column_chunks 1. `tile.dgrad_fc2.n` becomes 192
  where that fits, else 128 (open, where a given tile.n suits it), and `tile.dgrad_fc2.stages` less where tile.stages do not fit.
- `backward.wgrad` becomes `mixed` when a backward.wgrad_reserve other than 5 is given, and on cuda where I W / (W - 1) is below 1500
  and all else that is given goes with it. With mixed `fusion` becomes `layer`,
  order.interleave `phased` and `queue` `dynamic`.
- `backward.wgrad` else becomes `fill`, and `after` with fusion=none, or where cuda has no one kernel for the tiles that dgrad_fc1 and
  the weight gradients were given.
- `order.experts_per_wave` becomes 1 when a positive order.blocks_per_wave is given; `order.interleave` becomes `mixed` and `queue`
  `dynamic` when a positive order.second_share is.
- `comm.where` becomes `sms` when a positive comm.dispatch_sms, comm.relay_sms, comm.combine_sms or comm.reduce_sms is given, and
  `dispatch.transport` becomes `push` with a positive comm.relay_sms. With `sms`
  `comm.dispatch_sms` becomes 1, and so does `comm.combine_sms` with combine.transport=staged, combine_groups 0 and a worker left
  for it.
- `queue` becomes `dynamic` with comm.lend_sms=on.
- `combine.transport` becomes `staged` with combine_groups above 0, or when a positive comm.combine_sms is given.
- On cuda, open ring fields, then open tile fields, shrink until the shared memory suffices: by default the ring has the three
  stages that the pipeline leaves room for. `fusion` becomes `pairs` where fc1 and fc2 were given tiles that no one kernel has.
- For dispatch() or combine() alone: `fusion=none`, `combine.transport=staged`, and on cuda chunks of 4096 bytes and as many stages as
  fit; for a combine of 8192 bytes, with combine.column_chunks 8, or 2 with combine_groups above 0.
- `tile.m` follows a tile.fc1.m, tile.fc2.m, tile.dgrad_fc2.m or tile.dgrad_fc1.m that is given. `tile.fc1.n` becomes 128
  where tile.n is neither 128 nor 256. A stage with some tile values of its own may get more of them, to be legal.

## Rules

`available` stands for workers - comm.reserve_sms. All violated rules are reported at once.

- Every field has one of its values; order.experts_per_wave is at most El.
- comm.reserve_sms is at most workers - 1.
- comm.lend_sms=on needs queue=dynamic, comm.where=warps and dispatch.transport=pull. dispatch() and combine() alone ignore it.
- comm.where=warps: comm.dispatch_sms, comm.relay_sms, comm.combine_sms and comm.reduce_sms are 0.
- comm.where=sms: comm.dispatch_sms is at least 1; comm.combine_sms + comm.reduce_sms are at most available - 1;
  comm.dispatch_sms + comm.relay_sms are at most available - comm.combine_sms - comm.reduce_sms (they may be all of them: workers
  that dispatch or relay join the GEMM tiles). comm.relay_sms is 0 without dispatch.transport=push.
- combine.transport=epilogue: comm.combine_sms is 0.
- combine_groups above 0 (Numerics) needs combine.transport=staged.
- order.interleave=mixed needs fusion=layer. order.second_share above 0 needs order.interleave=mixed and queue=dynamic;
  order.blocks_per_wave above 0 needs fusion=layer, order.experts_per_wave=1 and, in backward, not backward.wgrad=mixed.
- Backward: backward.wgrad=fill needs a fusion other than none; backward.wgrad=mixed needs fusion=layer, order.interleave=phased
  and queue=dynamic; without it backward.wgrad_reserve is 5.
- tile.fc1.m, tile.fc2.m, tile.dgrad_fc2.m and tile.dgrad_fc1.m equal tile.m. The two wgrad stages are free.
- Forward: the columns of fc1's tile are 128 or 256.
- cuda, every stage of the direction: built are tile.m=128, tile.k=64, tile.n=128 and 256 (dgrad_fc2: 128 and 192),
  tile.pipeline=cooperative. A kernel takes tile.stages * (tile.m + tile.n) * tile.k * 2 bytes, 16384 for staging (dgrad_fc2: 49152),
  (comm.chunk_bytes + 16) * comm.stages for the ring and 6144 beside, rounded up to 1024, which fit into the shared memory of an
  SM (232448). All stages have the same tile.cluster; it divides available, the comm.*_sms, and with comm.lend_sms=on all workers.
  Forward with fusion=layer: fc1 and fc2 have the same tile.n and tile.stages.
- cuda, backward: dispatch.transport=push is not built yet, nor order.blocks_per_wave above 0. dgrad_fc2 has a stage for every 64 columns: tile.stages are at
  least tile.n / 64. fusion=layer has one wave, order.experts_per_wave=El, with order.interleave=phased and one tile.stages for
  dgrad_fc2 and dgrad_fc1, and is not built where router_weight=output multiplies biases. With backward.wgrad=fill and mixed the weight
  gradients have the tile.n and tile.stages of dgrad_fc1; with after their kernels have no ring, but take 12672 bytes in its
  place, and 1024 beside.
- dispatch() and combine() alone (`uniep schedule --op`) heed dispatch.*, queue, order.source_rotation, order.experts, order.experts_per_wave,
  combine.column_chunks, and of comm: reserve_sms; dispatch_sms (combine: combine_sms), at most available, 0 for all; chunk_bytes and
  stages. cuda: tile.m=128; each of the 16 warps of dispatch, and of 4 to 16 warps of combine, as many as fit, takes
  (comm.chunk_bytes + 16) * comm.stages + 512 bytes, and all share 5120. What other fields say changes nothing, and of the rules
  above only those of reserve_sms and experts_per_wave apply.
- hidden and intermediate are positive multiples of 8; topk is 1 to experts; ranks are 1 to 64 and divide experts;
  combine_groups is 0, or divides experts and is a multiple of ranks.

## How many there are

`uniep schedule --count` (with `--shape`, `--ranks`, `--engine`, `--direction`, and `--vary FIELD,...` for a part of the
space) prints three exact numbers, and the values that they are over. Fields with many values take the representative ones
that it prints.

- **legal**: what the rules of every engine allow.
- **buildable**: of those, what the engine has kernels for. It needs no GPU. The cpu engine runs all that is legal. Beside the
  rules above that begin with cuda, the cuda engine runs up to 8 ranks, 2048 experts, and 32 slots of a token or combine groups;
  above that nothing is buildable. With a process a GPU there is no push.
- **distinct**: of those, how many run differently. Schedules with one canonical name do the same tasks in the same order with the
  same waits, by the same kernels. The name has

  | field | canonical value | where |
  |---|---|---|
  | `dispatch.dedup` | on | topk is 1, or a rank has one expert |
  | `comm.chunk_bytes` | the power of two that holds a row | where it is more |
  | `comm.lend_sms` | off | comm.reserve_sms is 0 |
  | `order.experts_per_wave` | El | with backward.wgrad=mixed; without fusion=layer, push, or weight gradients of both GEMMs in one launch that does not dispatch x again |
  | `order.blocks_per_wave` | 2 | is 1, in clusters of two |
  | `order.experts` | ascending | a rank has one expert |
  | `order.interleave` | phased | there is one wave |
  | `order.second_share` | 0 | the GEMMs are not mixed (see order.interleave), or under static queues |
  | `order.source_rotation` | on | on one rank |
  | `order.raster` | whole clusters | clusters of two (1 is 2) |
  | `queue` | static | one worker is available, and neither GEMMs nor weight gradients are mixed |
  | `combine.column_chunks` | the chunks that are not empty | H is less than 8 columns a chunk |
  | `backward.wgrad_reserve` | 5 | forward |
  | `backward.wgrad`, `save.xg`, `save.z` | after, keep, keep | forward (what is kept costs memory, not time) |
  | `tile.cluster`, `tile.pipeline` | 1, cooperative | the cpu engine |
  | tiles by stage | in `tile.*` what the first stage has, and the others' where theirs differ | |

  Two schedules with different names may still run alike for a given routing; the number says so much and no more. Where stages'
  own tile fields vary (`--vary tile.fc1.n`) up to a million schedules are gone through one by one, and above that
  `distinct` is not counted.
)";

std::string table_rows() {
  const LayerShape shape{7168, 2048, 256, 8};
  const PartialSchedule open;
  const Machine gpus{EngineKind::kCuda, 8, 132};
  const Schedule forward = fill(open, {.direction = Direction::kForward, .shape = shape, .machine = gpus});
  const Schedule backward = fill(open, {.direction = Direction::kBackward, .shape = shape, .machine = gpus});
  const Schedule cpu =
      fill(open, {.direction = Direction::kBackward, .shape = shape, .machine = {EngineKind::kCpu, 8, 8}});
  std::string rows;
  for (int id = 0; id < kCommonFieldCount; ++id) {
    const FieldDescriptor& descriptor = descriptor_of(id);
    const ScheduleField& field = descriptor.field;
    const std::string legal = id == kOrderExpertsPerWave ? "1 to El" : legal_text(field);
    const auto filled = [&](const Schedule& schedule) { return value_text(field, *descriptor.get(schedule)); };
    rows += fmt::format("| `{}` | {} | {} | {} | {} | {} | {} |\n", field.name, legal, filled(forward),
                        filled(backward), filled(cpu), field.meaning, field.strategy);
  }
  return rows;
}

}  // namespace

std::string schedule_reference_markdown() {
  return kHead + table_rows() + kStages + kRules;
}

}  // namespace uniep
