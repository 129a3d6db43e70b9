#pragma once

#include <algorithm>
#include <vector>

#include "sim/machine.h"

namespace uniep::sim {

// The links of all ranks: what goes out of a rank and what comes into it stand in line, each way and level for itself.
class Links {
 public:
  // `folded`: rank 0 stands for all; what it takes in and what it gives out share one line, since its peers do the
  // same.
  Links(const MachineDescription& machine, int ranks, bool folded) : machine_(machine), ranks_(ranks), folded_(folded) {
    const std::size_t lines = machine.links.size() * static_cast<std::size_t>(ranks);
    in_.assign(lines, 0);
    out_.assign(lines, 0);
    for (std::size_t level = 0; level < machine.links.size(); ++level) {
      rates_.push_back(machine.link_rate(static_cast<int>(level), std::min(ranks, machine.links[level].ranks)));
    }
  }

  // GB/s of rows that are read or written, alone or beside others that go the other way.
  enum class Kind { kRead, kWrite, kBoth };
  double rate(int level, Kind kind) const {
    const LinkRate& rate = rates_[level];
    return kind == Kind::kRead ? rate.read : kind == Kind::kWrite ? rate.write : rate.both;
  }
  double latency(int from, int to) const {
    return from == to ? 0 : machine_.links[machine_.level_between(from, to)].latency;
  }

  // Takes bytes from one rank to another from `now` (us) on; when they are there.
  double carry(double now, int from, int to, double bytes, Kind kind) {
    const int level = machine_.level_between(from, to);
    const double takes = bytes / (rate(level, kind) * 1e3);
    const std::size_t begin = static_cast<std::size_t>(level) * ranks_;
    if (folded_) return in_[begin] = std::max(in_[begin], now) + takes;
    double& out = out_[begin + from];
    double& in = in_[begin + to];
    out = std::max(out, now) + takes;
    in = std::max(in, now) + takes;
    return std::max(out, in);
  }

 private:
  const MachineDescription& machine_;
  int ranks_;
  bool folded_;
  std::vector<LinkRate> rates_;   // by level
  std::vector<double> in_, out_;  // [level, rank] until when they are taken, us
};

}  // namespace uniep::sim
