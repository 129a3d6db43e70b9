// What ranks of a tuner tell each other, over their group's own connection.
#include <fmt/format.h>

#include <cstring>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "api/check_call.h"
#include "model/refuse.h"
#include "tune/rank_names.h"
#include "uniep/tuner.h"

namespace uniep {
namespace {

class GroupExchange final : public TunerExchange {
 public:
  explicit GroupExchange(Group& group) : engine_(group.implementation()) {}

  void give(int64_t number, std::span<const std::byte> own) override {
    if (number != given_) refuse(fmt::format("give: message {}; must be {}, the next one", number, given_));
    if (own.size() > kMaxExchangedBytes) {
      refuse(fmt::format("give: {} bytes; must be at most {}", own.size(), kMaxExchangedBytes));
    }
    api::with_heap([&] {
      std::vector<std::byte> message(sizeof(number));
      std::memcpy(message.data(), &number, sizeof(number));
      message.insert(message.end(), own.begin(), own.end());
      waiting_.emplace(number, std::move(message));
    });
    ++given_;
  }

  std::vector<std::vector<std::byte>> take(int64_t number) override {
    const auto own = waiting_.find(number);
    if (own == waiting_.end()) refuse(fmt::format("take: message {}; it was not given, or was taken", number));
    const internal::CallGate::Inside inside(engine_.gate());
    return api::with_heap([&] {
      std::vector<std::vector<std::byte>> all = engine_.tell_all(own->second);
      waiting_.erase(own);
      std::vector<int> others;
      for (std::size_t rank = 0; rank < all.size(); ++rank) {
        if (number_of(all[rank]) != number_of(all.front())) others.push_back(static_cast<int>(rank));
      }
      if (!others.empty()) {
        refuse(fmt::format("take: {} another message than rank 0, which takes {}",
                           tune::rank_names(others, "takes", "take"), number_of(all.front())));
      }
      for (std::vector<std::byte>& message : all) message.erase(message.begin(), message.begin() + sizeof(int64_t));
      return all;
    });
  }

 private:
  static int64_t number_of(const std::vector<std::byte>& message) {
    int64_t number = -1;
    if (message.size() >= sizeof(number)) std::memcpy(&number, message.data(), sizeof(number));
    return number;
  }

  internal::Engine& engine_;
  int64_t given_ = 0;  // how many were
  std::map<int64_t, std::vector<std::byte>> waiting_;
};

}  // namespace

std::shared_ptr<TunerExchange> make_tuner_exchange(Group& group) {
  return api::with_heap([&] { return std::make_shared<GroupExchange>(group); });
}

}  // namespace uniep
