// What a check of a candidate sees, and how it compares what calls wrote.
#include "train/candidate_check.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <string>

#include "engine/cpu/engine.h"
#include "support/checked_layer.h"
#include "support/disturb.h"
#include "support/expect_error.h"
#include "support/random_schedule_case.h"

namespace uniep::test {
namespace {

// The fault leaves rows of padding as they were, which weight gradients alone are summed over.
TEST(CandidateCheck, SeesWrongWeightGradientsOfEachKind) {
  for (const WeightGradient kind : {WeightGradient::kBFloat16, WeightGradient::kFloat32, WeightGradient::kMainGrad}) {
    for (const bool bias : {false, true}) {
      Numerics numerics;
      numerics.weight_gradient = kind;
      numerics.bias = bias;
      CheckedLayer own(numerics);
      disturb(own.group, {.shuffle_seed = 1});  // memory is full of NaN before each call
      const auto equal = [&](Direction direction, const Schedule& candidate) {
        return own.check.check(direction, candidate, own.forward, own.backward).equal;
      };
      EXPECT_TRUE(equal(Direction::kBackward, own.candidate));
      EXPECT_TRUE(equal(Direction::kForward, own.forward));
      dynamic_cast<cpu::CpuEngine&>(own.group.implementation()).plant(cpu::Fault::kSkippedPadding);
      EXPECT_TRUE(equal(Direction::kForward, own.forward));
      EXPECT_FALSE(equal(Direction::kBackward, own.candidate)) << static_cast<int>(kind) << bias;
    }
  }
}

// What fails beside the candidate is no fault of it; what fails under it is. Afterwards the group takes calls again.
TEST(CandidateCheck, AnIncumbentThatFailsIsNoFaultOfTheCandidate) {
  CheckedLayer own({}, 0.2);
  const Schedule candidate = own.schedule(Direction::kForward, "fusion=layer");
  auto& engine = dynamic_cast<cpu::CpuEngine&>(own.group.implementation());
  const auto checked = [&] { return own.check.check(Direction::kForward, candidate, own.forward, own.forward); };
  engine.plant(cpu::Fault::kSilentWorker);
  const std::string refused = checked().refused;
  EXPECT_TRUE(refused.starts_with("what runs now failed beside it: ")) << refused;
  engine.plant(cpu::Fault::kNone);
  EXPECT_TRUE(checked().equal);
  engine.plant(cpu::Fault::kSilentWorker);
  expect_error(Status::kTimeout, "", [&] { checked(); });
  engine.plant(cpu::Fault::kNone);
  EXPECT_TRUE(checked().equal);
}

// The definition: words of 32 bits, of which the last one is filled up with zeros.
uint64_t sum_of_words(const std::vector<unsigned char>& bytes) {
  uint64_t sum = 0;
  for (std::size_t first = 0; first < bytes.size(); first += 4) {
    uint32_t word = 0;
    for (std::size_t i = first; i < std::min(bytes.size(), first + 4); ++i)
      word |= uint32_t{bytes[i]} << 8 * (i - first);
    sum += io::mix64(first / 4, word);
  }
  return sum;
}

// As tests/cuda/gpu_ptx_tests.cpp holds the GPU's to the same.
TEST(ByteChecksum, IsOfWordsWhateverTheLength) {
  RandomBits random(3);
  for (const std::size_t count : {0, 1, 2, 3, 4, 5, 126, 4096, (1 << 23) + 7}) {
    std::vector<unsigned char> bytes(count);
    for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(1 + below(random, 255));
    const auto own = [&] { return train::byte_checksum(bytes.data(), static_cast<int64_t>(bytes.size())); };
    EXPECT_EQ(own(), sum_of_words(bytes)) << count;
    std::vector<float> words((count + 3) / 4);
    if (count > 0) std::memcpy(words.data(), bytes.data(), count);
    EXPECT_EQ(own(), io::checksum(words.data(), static_cast<int64_t>(words.size()), 0)) << count;
    if (count == 0) continue;
    const uint64_t before = own();
    bytes.back() ^= 1;
    EXPECT_NE(own(), before) << count;
  }
}

// Of a GPU that stands for one: the same bytes on it and on the host have the same checksum.
TEST(RankMemory, ChecksumsOfHostAndDeviceAreAlike) {
  class HostArrays : public train::DeviceArrays {
   public:
    std::shared_ptr<void> make(int, const void*, int64_t) const override { return nullptr; }
    std::shared_ptr<void> make_filled(int, unsigned char byte, int64_t bytes) const override {
      const auto own = std::make_shared<std::vector<unsigned char>>(static_cast<std::size_t>(bytes), byte);
      return {own, own->data()};
    }
    void read(int, const void*, void*, int64_t) const override {}
    uint64_t checksum(int, const void* array, int64_t bytes) const override {
      const auto* const first = static_cast<const unsigned char*>(array);
      return sum_of_words(std::vector<unsigned char>(first, first + bytes));
    }
  };
  const HostArrays arrays;
  for (const int64_t count : {0, 1, 2, 7, 64}) {
    std::array<std::vector<uint64_t>, 2> sums;
    for (const int device : {-1, 0}) {
      train::RankMemory memory(device, &arrays);
      BFloat16* const values = memory.unread_result<BFloat16>(count);
      if (device < 0) {
        EXPECT_NE(values, nullptr);
      }
      if (count > 0) {
        EXPECT_EQ(values[count - 1].bits, 0xffff);
        values[0].bits = 7;
      }
      EXPECT_EQ(memory.unread_result<float>(count + 1, 0)[count], 0);
      sums[device < 0 ? 0 : 1] = memory.checksums();
    }
    EXPECT_EQ(sums[0], sums[1]) << count;
  }
}

}  // namespace
}  // namespace uniep::test
