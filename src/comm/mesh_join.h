#pragma once

#include <optional>
#include <vector>

#include "comm/deadline.h"
#include "comm/mesh_link.h"
#include "comm/rank_mesh.h"

namespace uniep {

// Fills links[r] for every other rank r, or says why not: kTimeout that names every rank that did not come, kDevice if
// one that had come is dead, kInvalidArgument if one belongs to another group or library; `links` then has those that
// had come. A rank that gives up its part may come again: ranks of a group that failed meet under the same name, each
// when it has noticed.
std::optional<MeshFailure> join_mesh(const MeshBootstrap& bootstrap, const Deadline& deadline,
                                     std::vector<MeshLink>& links);

}  // namespace uniep
