#include "support/walked.h"

#include <gtest/gtest.h>

#include "program/walk.h"
#include "support/plain_counters.h"

namespace uniep::test {

Walked walk_rank(const RankProgram& p, std::mt19937_64& random) {
  struct Agent {
    AgentWalk walk;
    bool second = false;      // of a pair that has begun
    bool pair_ended = false;  // a pair's first, in this launch
  };
  Walked walked;
  std::vector<Agent> agents;
  for (int worker = 0; worker < p.workers; ++worker) {
    for (const AgentRole role : {AgentRole::kCopy, AgentRole::kCompute}) agents.push_back({AgentWalk(p, worker, role)});
  }
  walked.of_agent.resize(agents.size());
  const auto run = [&](std::size_t agent, const Task& task) {
    if (!task.has_tile()) return;
    walked.of_agent[agent].push_back(task);
    walked.all.push_back(task);
  };
  std::map<int64_t, int64_t> counters;
  for (int launch = 0; launch < p.launches; ++launch) {
    std::vector<std::size_t> left;
    for (std::size_t agent = 0; agent < agents.size(); ++agent) left.push_back(agent);
    for (Agent& agent : agents) agent.pair_ended = false;
    while (!left.empty()) {
      const std::size_t pick = random() % left.size(), index = left[pick];
      Agent& agent = agents[index];
      switch (agent.walk.next(PlainCounters{counters})) {
        case AgentWalk::Step::kTask:
          run(index, agent.walk.task());
          if (agent.walk.leads_pair()) run(index + 2, agent.walk.partners_task());
          break;
        case AgentWalk::Step::kPairBegins:
          EXPECT_EQ(index / 2 % 2, 1U);
          agent.second = true;
          ++walked.pairs;
          break;
        case AgentWalk::Step::kHandedOver:
          EXPECT_TRUE(agent.second);
          if (!agents[index - 2].pair_ended) break;
          agent.walk.leave_pair();
          agent.second = false;
          break;
        case AgentWalk::Step::kPairEnds:
          agent.pair_ended = true;
          break;
        case AgentWalk::Step::kLaunchEnds:
          EXPECT_FALSE(agent.second);
          agent.walk.next_launch();
          left[pick] = left.back();
          left.pop_back();
          break;
      }
    }
  }
  for (const Agent& agent : agents) EXPECT_TRUE(agent.walk.finished());
  return walked;
}

}  // namespace uniep::test
