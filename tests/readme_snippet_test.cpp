// README.md's program compiles, and its layer runs. CMake takes it out of README.md.
#include "readme_snippet.h"

#include <gtest/gtest.h>

#include <vector>

namespace {

TEST(ReadmeSnippet, RunsALayer) {
  uniep::GroupOptions options;
  options.engine = uniep::EngineKind::kCpu;
  uniep::Group group(options);
  const uniep::LayerConfig config{{.hidden = 16, .intermediate = 8, .experts = 2, .topk = 2}, {}};

  constexpr uniep::BFloat16 kOne{0x3f80};
  const std::vector<uniep::BFloat16> x(3 * 16, kOne), w1(2 * 16 * 16, kOne), w2(2 * 16 * 8, kOne);
  std::vector<uniep::BFloat16> y(x.size(), {0});
  const std::vector<int32_t> ids{0, 1, 1, -1, -1, -1};  // the last token goes to nobody
  const std::vector<float> probs(ids.size(), 1.0f);
  uniep::Routing routing;
  routing.tokens = 3;
  routing.topk_ids = ids.data();
  routing.probs = probs.data();
  uniep::ForwardArguments arguments;
  arguments.x = x.data();
  arguments.weights.w1 = w1.data();
  arguments.weights.w2 = w2.data();
  arguments.y = y.data();

  const uniep::Saved saved = moe_layer(group, config, routing, arguments);
  // silu(16) * 16 = 256 after rounding, times 8 columns of I; two experts, one, none.
  for (int column = 0; column < 16; ++column) {
    EXPECT_EQ(y[column].bits, 0x4580) << "4096 of token 0";
    EXPECT_EQ(y[16 + column].bits, 0x4500) << "2048 of token 1";
    EXPECT_EQ(y[32 + column].bits, 0) << "token 2";
  }
  EXPECT_EQ(saved.placement().rows(0), 3);
}

}  // namespace
