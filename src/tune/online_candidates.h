#pragma once

#include <vector>

#include "sim/machine.h"
#include "uniep/tuner.h"

namespace uniep::tune {

// Whether a Schedule is legal and has a kernel.
bool is_runnable(const Schedule& schedule, const ScheduleRequest& request);

// What is worth trying beside an incumbent, a pure function of its arguments: on cuda the solver's best of a forward
// layer, then what differs from the incumbent in one field. Each is legal, has a kernel, runs otherwise than the
// incumbent and the others, needs no other saved state, keeps the fixed fields and comm.reserve_sms, and, where the
// closed form knows it, is predicted within 5 % of the incumbent on the described machine.
std::vector<Schedule> online_candidates(const TunerLayer& layer, Direction direction, const Machine& machine,
                                        const Schedule& incumbent, const sim::MachineDescription& description);

// Whether a Schedule is legal, has a kernel, and passes the checker on a small batch.
bool is_proven(const TunerLayer& layer, Direction direction, const Machine& machine, const Schedule& schedule);

}  // namespace uniep::tune
