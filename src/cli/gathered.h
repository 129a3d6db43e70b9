#pragma once

#include <span>
#include <vector>

#include "engine/engine.h"
#include "uniep/layer.h"

// What the processes of a group have, in rank order, in rank 0's; nothing in the others. Collective.
namespace uniep::cli {

template <typename T>
std::vector<T> gathered(Group& group, const std::vector<T>& own) {
  std::vector<T> all;
  group.implementation().gather(std::as_bytes(std::span(own)), [&all](std::size_t bytes) {
    all.resize(bytes / sizeof(T));
    return std::as_writable_bytes(std::span(all)).data();
  });
  return all;
}

// Times of what all ranks have done: in rank 0's process each is the slowest rank's, in the others their own.
std::vector<double> slowest_times(Group& group, std::vector<double> own);

// Brings the processes' clocks together, too.
std::vector<TileEvent> gathered_events(Group& group, const std::vector<TileEvent>& own);

}  // namespace uniep::cli
