#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cli/layer_options.h"
#include "tune/tuned.h"

// What "auto" stands for: the fields that were given; then --tuned's entry for this layer and machine, then that of
// the cache that `uniep tune` writes; then the built-in defaults. Nothing is timed.
namespace uniep::cli {

// The entry that this layer would have. Without the fields of a Schedule.
tune::TunedKey tuned_key(const LayerOptions& options, Direction direction, const Group& group);
// Where `uniep tune` keeps what it finds: UNIEP_CACHE_DIR, as for compiled kernels.
tune::TunedFolder tuned_folder();

// The fields that were given over a whole Schedule's; none where that is not legal or has no kernel, for what is then
// in `why`.
std::optional<Schedule> overlaid(const LayerOptions& options, Direction direction, const Group& group,
                                 const Schedule& whole, std::string& why);

// Collective where ranks are in several processes: rank 0's choice counts. With UNIEP_SCHEDULE_LOG=1 a line on standard
// error says where it is from. Throws Error(kInvalidArgument) for fields that were given and are not legal, for a
// --tuned that is no such file, and with --tuned-strict where it has no entry that is legal; on all ranks what rank 0's
// file is refused for.
Schedule chosen_schedule(const LayerOptions& options, Direction direction, Group& group);

// A text of rank 0 on all ranks. Collective where ranks are in several processes.
std::string text_of_first_rank(Group& group, const std::string& own);
// Likewise of what rank 0 makes. An Error that it throws there is thrown on all ranks.
std::string text_made_by_first_rank(Group& group, const std::function<std::string()>& make);
// Ranks whose text is another than rank 0's. Collective likewise.
std::vector<int> ranks_that_differ(Group& group, const std::string& own);

}  // namespace uniep::cli
