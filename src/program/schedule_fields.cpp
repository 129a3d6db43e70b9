#include "program/schedule_fields.h"

#include <type_traits>
#include <unordered_map>
#include <utility>

#include "uniep/error.h"

namespace uniep {
namespace {

constexpr int kMaxLocalExperts = 65536;
constexpr int kMaxWorkersOfAField = 1024;

template <typename T>
struct IsOptional : std::false_type {};
template <typename T>
struct IsOptional<std::optional<T>> : std::true_type {};

// `access` gives the member of a Schedule (const or not) that holds the field.
template <typename Access>
FieldDescriptor describe(ScheduleField field, Access access) {
  using Member = std::remove_reference_t<decltype(access(std::declval<Schedule&>()))>;
  FieldDescriptor descriptor;
  descriptor.field = std::move(field);
  descriptor.get = [access](const Schedule& schedule) -> std::optional<int> {
    const auto& member = access(schedule);
    if constexpr (IsOptional<Member>::value) {
      return member ? std::optional<int>(static_cast<int>(*member)) : std::nullopt;
    } else {
      return static_cast<int>(member);
    }
  };
  descriptor.set = [access](Schedule& schedule, std::optional<int> value) {
    auto& member = access(schedule);
    if constexpr (IsOptional<Member>::value) {
      if (value) {
        member = static_cast<typename Member::value_type>(*value);
      } else {
        member.reset();
      }
    } else {
      member = static_cast<Member>(value.value());
    }
  };
  return descriptor;
}

ScheduleField words(const char* name, std::vector<std::string> legal, const char* meaning, const char* strategy) {
  ScheduleField field{name, meaning, strategy, std::move(legal), 0, 0, false, {}};
  field.maximum = static_cast<int>(field.words.size()) - 1;
  return field;
}

ScheduleField range(const char* name, int minimum, int maximum, const char* meaning, const char* strategy) {
  return {name, meaning, strategy, {}, minimum, maximum, false, {}};
}

ScheduleField powers_of_two(const char* name, int minimum, int maximum, const char* meaning, const char* strategy) {
  return {name, meaning, strategy, {}, minimum, maximum, true, {}};
}

ScheduleField numbers(const char* name, std::vector<int> legal, const char* meaning, const char* strategy) {
  ScheduleField field{name, meaning, strategy, {}, legal.front(), legal.back(), false, {}};
  field.numbers = std::move(legal);
  return field;
}

#define UNIEP_MEMBER(path) ([](auto& schedule) -> auto& { return schedule.path; })

void add_launch_and_dispatch(std::vector<FieldDescriptor>& table) {
  table.push_back(describe(
      words(
          "fusion", {"none", "pairs", "layer"},
          "How many launches a direction takes. none: one launch a stage, each begins when the one before it is over. "
          "pairs: two, Dispatch with the first GEMM (FC1, or dgrad FC2) and the second GEMM (FC2, or dgrad FC1) with "
          "Combine. layer: one for the whole direction. Weight gradients: see backward.wgrad. Inside a launch a tile "
          "starts as soon as the tiles that it reads are done.",
          "none: serial kernels (Megatron); pairs: COMET, the UniEP paper; layer: HyperParallel-MoE, Mega MoE"),
      UNIEP_MEMBER(fusion)));
  table.push_back(describe(
      words("dispatch.transport", {"pull", "push"},
            "Who moves a row of x (dy in backward). pull: the rank that owns the expert reads it from the source rank. "
            "push: the source rank writes it into the owner's memory and raises a flag per row block; the owner then "
            "zeroes padding and makes local copies.",
            "pull: DeepGEMM, FlashInfer; push: DeepEP, Hybrid-EP"),
      UNIEP_MEMBER(dispatch.transport)));
  table.push_back(describe(
      words("dispatch.dedup", {"off", "on"},
            "on: a token crosses NVLink once per rank, however many of the rank's experts want it, and the receiver "
            "copies it to its other expert rows. off: it crosses once per (token, slot).",
            "on: one NVLink row per (token, rank), 5.3 instead of 8 rows at top-8 over 8 ranks"),
      UNIEP_MEMBER(dispatch.dedup)));
}

void add_communication(std::vector<FieldDescriptor>& table) {
  table.push_back(describe(
      words("comm.where", {"warps", "sms"},
            "Who copies. warps: every worker has a copy agent (on cuda a copy warp in every CTA) beside its compute "
            "agent; dispatch, staged sends and the reduction are its work. sms: workers have a compute agent only, and "
            "the three comm.*_sms fields say which workers copy.",
            "warps: a copy warp in every CTA; sms: SM specialisation (the UniEP paper)"),
      UNIEP_MEMBER(comm.where)));
  table.push_back(
      describe(range("comm.dispatch_sms", 0, kMaxWorkersOfAField,
                     "With comm.where=sms: workers that dispatch first and join the GEMM tiles when that is done.",
                     "the UniEP paper's N_disp; Hybrid-EP's few SMs"),
               UNIEP_MEMBER(comm.dispatch_sms)));
  table.push_back(describe(
      range(
          "comm.relay_sms", 0, kMaxWorkersOfAField,
          "With comm.where=sms and dispatch.transport=push: workers that make the owner's local copies of pushed rows "
          "while those of comm.dispatch_sms push; they join the GEMM tiles when that is done. 0: the workers that "
          "push make them, too, one wave behind their pushes.",
          "the UniEP paper's N_relay"),
      UNIEP_MEMBER(comm.relay_sms)));
  table.push_back(describe(
      range("comm.combine_sms", 0, kMaxWorkersOfAField,
            "With comm.where=sms and combine.transport=staged: workers that only send finished rows to their source "
            "ranks and compute no GEMM tile. 0: the computing workers send, after their GEMM tiles.",
            "the UniEP paper's N_comb"),
      UNIEP_MEMBER(comm.combine_sms)));
  table.push_back(describe(
      range(
          "comm.reduce_sms", 0, kMaxWorkersOfAField,
          "With comm.where=sms: workers that only sum the slots of this rank's tokens and compute no GEMM tile. 0: all "
          "workers do so, after everything else.",
          "the UniEP paper's N_red"),
      UNIEP_MEMBER(comm.reduce_sms)));
  table.push_back(describe(
      powers_of_two("comm.chunk_bytes", 512, 65536,
                    "Bytes that a copy loads and stores at a time through its ring; a row is cut into chunks of this "
                    "size, the last of them shorter.",
                    "Hybrid-EP's chunk pipeline"),
      UNIEP_MEMBER(comm.chunk_bytes)));
  table.push_back(describe(
      range("comm.stages", 1, 16,
            "Chunks that a copy's ring holds, and so keeps in flight. The ring takes comm.chunk_bytes * comm.stages "
            "bytes, on cuda of the memory that the pipeline (tile.n, tile.stages) leaves.",
            "Hybrid-EP's chunk pipeline"),
      UNIEP_MEMBER(comm.stages)));
  table.push_back(
      describe(range("comm.reserve_sms", 0, kMaxWorkersOfAField,
                     "Workers that the call leaves alone, for other kernels; what remains is called available below.",
                     "room for a concurrent NCCL collective"),
               UNIEP_MEMBER(comm.reserve_sms)));
  table.push_back(
      describe(words("comm.lend_sms", {"off", "on"},
                     "on: reserved workers, too, dispatch and run GEMM tiles while nothing else has their SMs. On cuda "
                     "one leaves after a part of the call (0.4 ms or more), for a kernel of a stream of higher "
                     "priority that waits for SMs; others wait until the call is over.",
                     "one grid for all SMs, which begins on those that are free"),
               UNIEP_MEMBER(comm.lend_sms)));
}

void add_order(std::vector<FieldDescriptor>& table) {
  table.push_back(describe(
      range(
          "order.experts_per_wave", 1, kMaxLocalExperts,
          "Local experts in a wave, at most El. With fusion=layer the second GEMM of a wave is issued right after (or "
          "beside, see order.interleave) the first GEMM of it; push runs one wave ahead of the receiver; weight "
          "gradients alternate between FC2 and FC1 wave by wave (with save.xg=redispatch only if fusion=layer; else "
          "all of FC2 come first). backward.wgrad=mixed has an order of its own.",
          "FlashInfer's scheduler groups"),
      UNIEP_MEMBER(order.experts_per_wave)));
  table.push_back(describe(
      numbers(
          "order.blocks_per_wave", {0, 1, 2, 4, 8, 16, 32, 64},
          "Row blocks of one expert in a wave of the two row GEMMs, for ranks with few experts. With tile.cluster=2 "
          "1 is 2. 0: waves are whole experts.",
          "waves inside an expert"),
      UNIEP_MEMBER(order.blocks_per_wave)));
  table.push_back(describe(
      words(
          "order.experts", {"ascending", "heavy_first"},
          "The order in which a rank's experts come. heavy_first: those with the most rows first, of equal ones the "
          "lower; a pushing rank takes each owner's experts in the owner's order. With dispatch.dedup=on a token comes "
          "with the lowest of its experts all the same.",
          "longest processing time first, under skewed routing"),
      UNIEP_MEMBER(order.experts)));
  table.push_back(describe(
      words(
          "order.interleave", {"phased", "mixed"},
          "phased: the first GEMM of a wave, then the second GEMM of that wave, then the next wave. mixed: the second "
          "GEMM of a wave runs beside the first GEMM of the next ones. Under static queues their tiles alternate in "
          "proportion; under dynamic ones each GEMM has a queue, and most workers stay with one of the two.",
          "mixed: both directions of NVLink stay busy"),
      UNIEP_MEMBER(order.interleave)));
  table.push_back(describe(
      range(
          "order.second_share", 0, 15,
          "With mixed GEMMs under dynamic queues: sixteenths of the workers that prefer the second GEMM, one worker at "
          "least and all but one at most. 0: as many as the second GEMM's first column chunk takes of the time that "
          "it and the first GEMM take. Elsewhere legal is 0.",
          "which part of the SMs runs the GEMM that fills the links' other direction"),
      UNIEP_MEMBER(order.second_share)));
  table.push_back(describe(
      words(
          "order.source_rotation", {"off", "on"},
          "on: the row blocks of an expert are issued beginning with this rank's own rows, then those of rank + 1, and "
          "so on around; a pushing rank serves itself first, then rank + 1, and so on. off: in placement order, and "
          "ranks ascending.",
          "on: no source is asked by all at once"),
      UNIEP_MEMBER(order.source_rotation)));
  table.push_back(describe(
      range("order.raster", 1, 16,
            "Row blocks in a group: inside a group every row block is run against a column tile before the next column "
            "tile, so that a weight tile is used by the whole group while it is in cache.",
            "L2 reuse"),
      UNIEP_MEMBER(order.raster)));
  table.push_back(describe(
      words("queue", {"static", "dynamic"},
            "static: the tiles of a worker follow from its number, round robin over the list (a worker that dispatches "
            "or relays first joins at a position that is fixed beforehand). dynamic: a worker takes the next tile of "
            "the list by "
            "a ticket from one counter (mixed GEMMs: one each).",
            "static: HyperParallel-MoE's static task lists; dynamic: ticket counters"),
      UNIEP_MEMBER(queue)));
}

// The six fields of a tile: of the whole schedule, or of a stage, whose members may be without a value.
struct TileField {
  const char* name;
  std::vector<int> legal;
  const char* meaning;
  const char* strategy;
};

const TileField kTileFields[kTileFieldCount] = {
    {"m",
     {64, 128, 256},
     "Rows of a GEMM's output tile. It is the row block, too: the unit in which dispatch, GEMMs and combine wait for "
     "each other.",
     "GEMM core"},
    {"n",
     {64, 128, 192, 256},
     "Columns of a GEMM's output tile. In fc1 gate and up columns count together: 256 is 128 of each, and only 128 and "
     "256 are legal.",
     "GEMM core"},
    {"k",
     {32, 64, 128},
     "Depth of one pipeline stage along the dot product. Sums run along K ascending in one chain whatever it is. The "
     "cpu engine packs tile.k * tile.stages of depth at a time.",
     "GEMM core"},
    {"stages",
     {2, 3, 4, 5, 6, 7, 8},
     "Pipeline stages that a GEMM keeps in shared memory. The cpu engine: see tile.k.",
     "GEMM core"},
    {"cluster", {1, 2}, "CTAs that share one weight tile. The cpu engine ignores it.", "GEMM core"},
    {"pipeline",
     {},
     "cooperative: the math warpgroups of a CTA work on one tile together. pingpong: each has a tile of its own, so "
     "that "
     "one's epilogue overlaps the other's GEMMs. The cpu engine ignores it.",
     "GEMM core"},
};

ScheduleField tile_field(int index, const std::string& name, bool is_fc1) {
  const TileField& tile = kTileFields[index];
  const FieldId id = static_cast<FieldId>(kTileM + index);
  if (id == kTilePipeline) return words(name.c_str(), {"cooperative", "pingpong"}, tile.meaning, tile.strategy);
  if (id == kTileStages) return range(name.c_str(), tile.legal.front(), tile.legal.back(), tile.meaning, tile.strategy);
  return numbers(name.c_str(), id == kTileN && is_fc1 ? std::vector<int>{128, 256} : tile.legal, tile.meaning,
                 tile.strategy);
}

// `access_tile` gives the TileShape or TileOverride of a Schedule.
template <typename AccessTile>
void add_tile(std::vector<FieldDescriptor>& table, const std::string& prefix, std::optional<GemmStage> stage,
              AccessTile access_tile) {
  const auto add = [&](int index, auto access_member) {
    const std::string name = prefix + "." + kTileFields[index].name;
    table.push_back(describe(
        tile_field(index, name, stage == GemmStage::kFc1), [=](auto& schedule) -> auto& {
          return access_member(access_tile(schedule));
        }));
    table.back().stage = stage;
  };
  add(
      0, [](auto& tile) -> auto& { return tile.m; });
  add(
      1, [](auto& tile) -> auto& { return tile.n; });
  add(
      2, [](auto& tile) -> auto& { return tile.k; });
  add(
      3, [](auto& tile) -> auto& { return tile.stages; });
  add(
      4, [](auto& tile) -> auto& { return tile.cluster; });
  add(
      5, [](auto& tile) -> auto& { return tile.pipeline; });
}

void add_combine_and_backward(std::vector<FieldDescriptor>& table) {
  table.push_back(describe(
      words(
          "combine.transport", {"epilogue", "staged"},
          "epilogue: the second GEMM's epilogue stores its rows straight into the slots of the source rank. staged: it "
          "stores to local memory, and copies send each row block when all of its columns (of one chunk) are done.",
          "epilogue: stores fused into the GEMM; staged: local memory and copies"),
      UNIEP_MEMBER(combine.transport)));
  table.push_back(describe(
      range("combine.column_chunks", 1, 8,
            "Bands of columns of H. The second GEMM finishes one band after the other, over all waves, and a band is "
            "reduced as soon as it has arrived. Bounds are multiples of 8 columns; an empty band is skipped.",
            "COMET: finish a band of columns early, so that its reduction overlaps"),
      UNIEP_MEMBER(combine.column_chunks)));
  table.push_back(describe(
      words(
          "backward.wgrad", {"after", "fill", "mixed"},
          "after: weight gradients have launches of their own, the last ones. fill: their tiles follow the second GEMM "
          "in its launch and fill the time in which the combine drains. mixed: a part of the workers runs them beside "
          "the others' dgrads, as soon as their experts are through the first GEMM, but for backward.wgrad_reserve. "
          "Forward ignores it.",
          "fill: weight gradients hide the combine; mixed: and dispatch, where the links take longer than the dgrads"),
      UNIEP_MEMBER(wgrad)));
  table.push_back(describe(
      range("backward.wgrad_reserve", 0, 16,
            "With backward.wgrad=mixed: sixteenths of the weight gradients' tiles that stay for behind the last dgrad "
            "and cover the last sends and sums. As many workers leave the first GEMM for the other sixteenths as these "
            "take of the time that they and the first GEMM take. Without mixed legal is 5.",
            "which part of the weight gradients hides which copies"),
      UNIEP_MEMBER(wgrad_reserve)));
  table.push_back(describe(
      words("save.xg", {"keep", "redispatch"},
            "What FC1's weight gradient reads. keep: forward saves the dispatched rows, and backward reads them. "
            "redispatch: forward does not, and backward dispatches x again: behind dy, or with fusion=pairs and "
            "comm.where=warps beside dgrad FC1. Backward with keep needs a forward with keep; backward with redispatch "
            "is "
            "always possible.",
            "memory against bandwidth"),
      UNIEP_MEMBER(save_xg)));
  table.push_back(describe(
      words("save.z", {"keep", "recompute"},
            "Where backward has FC1's output from. keep: forward saves it. recompute: forward does not, and backward "
            "runs "
            "FC1 again before its own stages, of the rows that save.xg keeps, or of x, which is then dispatched again "
            "with "
            "it and not a second time. Backward with keep needs a forward with keep; backward with recompute is always "
            "possible.",
            "memory against FLOPs"),
      UNIEP_MEMBER(save_z)));
}

#undef UNIEP_MEMBER

std::vector<FieldDescriptor> make_table() {
  std::vector<FieldDescriptor> table;
  add_launch_and_dispatch(table);
  add_communication(table);
  add_order(table);
  add_tile(
      table, "tile", std::nullopt, [](auto& schedule) -> auto& { return schedule.tile; });
  add_combine_and_backward(table);
  for (int stage = 0; stage < kGemmStageCount; ++stage) {
    add_tile(
        table, std::string("tile.") + stage_label(static_cast<GemmStage>(stage)),
        static_cast<GemmStage>(stage), [stage](auto& schedule) -> auto& { return schedule.stage_tile[stage]; });
  }
  if (table.size() != kFieldCount) throw Error(Status::kInternal, "the table of schedule fields is not complete");
  return table;
}

}  // namespace

const std::vector<FieldDescriptor>& field_descriptors() {
  static const std::vector<FieldDescriptor> table = make_table();
  return table;
}

const std::vector<ScheduleField>& schedule_fields() {
  static const std::vector<ScheduleField> fields = [] {
    std::vector<ScheduleField> out;
    for (const FieldDescriptor& descriptor : field_descriptors()) out.push_back(descriptor.field);
    return out;
  }();
  return fields;
}

const char* stage_label(GemmStage stage) {
  constexpr const char* kLabels[kGemmStageCount] = {"fc1", "fc2", "dgrad_fc2", "dgrad_fc1", "wgrad_fc2", "wgrad_fc1"};
  return kLabels[static_cast<int>(stage)];
}

std::vector<GemmStage> stages_of(Direction direction) {
  if (direction == Direction::kForward) return {GemmStage::kFc1, GemmStage::kFc2};
  return {GemmStage::kDgradFc2, GemmStage::kDgradFc1, GemmStage::kWgradFc2, GemmStage::kWgradFc1};
}

std::optional<FieldId> find_field(std::string_view name) {
  static const std::unordered_map<std::string_view, FieldId> by_name = [] {
    std::unordered_map<std::string_view, FieldId> fields;
    for (int field = 0; field < kFieldCount; ++field) fields[name_of(field)] = static_cast<FieldId>(field);
    return fields;
  }();
  const auto found = by_name.find(name);
  return found == by_name.end() ? std::nullopt : std::optional<FieldId>(found->second);
}

TileShape Schedule::tile_of(GemmStage stage) const {
  const TileOverride& own = stage_tile[static_cast<int>(stage)];
  return {own.m.value_or(tile.m),
          own.n.value_or(tile.n),
          own.k.value_or(tile.k),
          own.stages.value_or(tile.stages),
          own.cluster.value_or(tile.cluster),
          own.pipeline.value_or(tile.pipeline)};
}

}  // namespace uniep
