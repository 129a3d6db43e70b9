// README.md's program compiles, and its layer runs. CMake takes it out of README.md.
#include "readme_snippet.h"

#include <gtest/gtest.h>

#include <vector>

namespace {

TEST(ReadmeSnippet, RunsALayer) {
  uniep::GroupOptions options;
  options.engine = uniep::EngineKind::kCpu;
  uniep::Group group(options);
  const uniep::Layer layer(group, {.hidden = 16, .intermediate = 8, .experts = 2, .topk = 2});

  constexpr uniep::BFloat16 kOne{0x3f80};
  const std::vector<uniep::BFloat16> x(3 * 16, kOne), w1(2 * 16 * 16, kOne), w2(2 * 16 * 8, kOne);
  std::vector<uniep::BFloat16> y(x.size(), {0}), dx(x.size(), {0xffff}), dw1(w1.size()), dw2(w2.size());
  const std::vector<int32_t> ids{0, 1, 1, -1, -1, -1};  // the last token goes to nobody
  const std::vector<float> probs(ids.size(), 1.0f);
  std::vector<float> dprobs(ids.size(), -1.0f);
  const uniep::Weights weights{.w1 = w1.data(), .w2 = w2.data()};
  moe_layer(layer, {.tokens = 3, .topk_ids = ids.data(), .probs = probs.data()},
            {.x = x.data(), .weights = weights, .y = y.data()},
            {.dy = x.data(),
             .weights = weights,
             .dx = dx.data(),
             .dprobs = dprobs.data(),
             .gradients = {.dw1 = dw1.data(), .dw2 = dw2.data()}});
  // silu(16) * 16 = 256 after rounding, times 8 columns of I; two experts, one, none.
  for (int column = 0; column < 16; ++column) {
    EXPECT_EQ(y[column].bits, 0x4580) << "4096 of token 0";
    EXPECT_EQ(y[16 + column].bits, 0x4500) << "2048 of token 1";
    EXPECT_EQ(y[32 + column].bits, 0) << "token 2";
  }
  for (int column = 0; column < 16; ++column) EXPECT_EQ(dx[32 + column].bits, 0) << "token 2";
  for (std::size_t slot = 0; slot < dprobs.size(); ++slot) {
    EXPECT_NEAR(dprobs[slot], ids[slot] < 0 ? 0 : 16 * 2048, ids[slot] < 0 ? 0 : 1) << "dy . W2 a of slot " << slot;
  }
}

}  // namespace
