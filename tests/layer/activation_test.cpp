#include "reference/activation.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "model/activation_choice.h"
#include "support/c_layer.h"
#include "support/expect_error.h"
#include "support/layer_arrays.h"

// Activations and places of the router's weight: their text, what is refused, and how close the functions are.
namespace uniep::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

Numerics numerics_of(const std::string& text, RouterWeight weight = RouterWeight::kActivation) {
  Numerics numerics;
  set_activation(numerics, text);
  numerics.router_weight = weight;
  return numerics;
}

TEST(ActivationText, IsReadAndWritten) {
  for (const char* text :
       {"swiglu", "geglu_tanh", "geglu_erf", "relu2", "silu", "swiglu:alpha=1.702,limit=7,up_offset=1",
        "swiglu:gate_limit=7", "swiglu:gate_limit=5,up_limit=7", "swiglu:up_offset=-0.5"}) {
    EXPECT_EQ(activation_text(numerics_of(text)), text);
  }
  const Numerics oss = numerics_of("swiglu:up_offset=1,limit=7,alpha=1.702");
  EXPECT_EQ(oss.alpha, 1.702f);
  EXPECT_EQ(oss.gate_limit, 7.0f);
  EXPECT_EQ(oss.up_limit, 7.0f);
  EXPECT_EQ(oss.up_offset, 1.0f);
  Numerics again = oss;
  set_activation(again, "swiglu");
  EXPECT_EQ(again, Numerics());
  for (const RouterWeight weight : {RouterWeight::kActivation, RouterWeight::kOutput, RouterWeight::kInput}) {
    EXPECT_EQ(router_weight_from(router_weight_text(weight)), weight);
  }
}

TEST(ActivationText, RefusesWhatIsWrong) {
  const std::pair<const char*, const char*> wrong[] = {
      {"relu", "activation: 'relu'; legal are swiglu, geglu_tanh"},
      {"", "activation: ''; legal are swiglu"},
      {"swiglu:", "activation: 'swiglu:'; legal are"},
      {"swiglu:beta=1", "has no parameter beta"},
      {"swiglu:limit=seven", "activation: limit is 'seven'; must be a finite number"},
      {"swiglu:limit=7,,alpha=2", "legal are"},
      {"swiglu:alpha=1,alpha=2", "activation: 'swiglu:alpha=1,alpha=2' gives alpha twice; legal is once"},
      {"swiglu:limit=nan", "activation: limit is 'nan'; must be a finite number"},
      {"swiglu:limit=inf", "activation: limit is 'inf'; must be a finite number"},
      {"swiglu:gate_limit=-7", "gate_limit=-7: legal are 0 (no limit) and numbers above 0"},
      {"swiglu:up_limit=-1", "up_limit=-1: legal are 0 (no limit)"},
      {"swiglu:alpha=0", "alpha=0: legal is a number above 0"},
      {"geglu_erf:limit=7", "activation=geglu_erf: takes no alpha, limit or offset"}};
  for (const auto& [text, message] : wrong) {
    Numerics numerics = numerics_of("silu");
    expect_error(Status::kInvalidArgument, message, [&, text = text] { set_activation(numerics, text); });
    EXPECT_EQ(numerics, numerics_of("silu")) << text;
  }
  expect_error(Status::kInvalidArgument, "router_weight: 'inside'; legal are activation, output and input",
               [] { router_weight_from("inside"); });
}

TEST(ActivationRules, NumbersThatAreNotLegalAreNamed) {
  const Machine cpu{EngineKind::kCpu, 2, 4}, cuda{EngineKind::kCuda, 2, 132};
  const LayerShape shape{256, 128, 8, 2};
  const auto refused = [&](const Numerics& numerics, const Machine& machine, const std::string& message) {
    expect_error(Status::kInvalidArgument, message, [&] {
      resolve(PartialSchedule(),
              {.direction = Direction::kForward, .shape = shape, .numerics = numerics, .machine = machine});
    });
  };
  Numerics numerics;
  numerics.gate_limit = kNan;
  refused(numerics, cpu, "gate_limit=nan: legal are 0 (no limit) and numbers above 0");
  numerics.gate_limit = -1;
  refused(numerics, cpu, "gate_limit=-1: ");
  numerics = {};
  numerics.up_limit = kInfinity;
  refused(numerics, cpu, "up_limit=inf: ");
  numerics = {};
  numerics.alpha = kNan;
  refused(numerics, cpu, "alpha=nan: legal is a number above 0");
  numerics = {};
  numerics.up_offset = kInfinity;
  refused(numerics, cpu, "up_offset=inf: legal is a finite number");
  numerics = {};
  numerics.activation = static_cast<Activation>(5);
  refused(numerics, cpu, "activation=5: legal are swiglu (0)");
  numerics = {};
  numerics.router_weight = static_cast<RouterWeight>(3);
  refused(numerics, cpu, "router_weight=3: legal are activation (0), output (1) and input (2)");
  numerics = numerics_of("relu2");
  numerics.alpha = 2;
  refused(numerics, cpu, "activation=relu2: takes no alpha, limit or offset; only swiglu does");
  for (const Machine& machine : {cpu, cuda}) {
    numerics = numerics_of("silu", RouterWeight::kInput);
    numerics.bias = true;
    refused(numerics, machine, "bias=1: not with router_weight=input; legal with activation and output");
  }
}

TEST(ActivationRules, BothEnginesServeAllOfThem) {
  for (const EngineKind engine : {EngineKind::kCpu, EngineKind::kCuda}) {
    const Machine machine{.engine = engine, .ranks = 2, .workers = 132};
    for (const char* text : {"swiglu", "geglu_tanh", "geglu_erf", "relu2", "silu", "swiglu:gate_limit=7",
                             "swiglu:alpha=1.702,limit=7,up_offset=1"}) {
      for (const RouterWeight weight : {RouterWeight::kActivation, RouterWeight::kOutput, RouterWeight::kInput}) {
        for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
          EXPECT_NO_THROW(resolve(PartialSchedule(), {.direction = direction,
                                                      .shape = {64, 64, 4, 2},
                                                      .numerics = numerics_of(text, weight),
                                                      .machine = machine}))
              << text;
        }
      }
    }
  }
}

TEST(ActivationRules, ASavedOfAnotherActivationOrPlaceIsRefused) {
  RandomLayer layer = random_layer(3, {.ranks = {2}, .most_local_experts = 4, .fewest_tokens = 4});
  const auto run = [&](const Numerics& forward, const Numerics& backward) {
    GroupOptions options;
    options.engine = EngineKind::kCpu;
    options.ranks = layer.ranks;
    Group group(options);
    LayerArrays arrays(layer);
    const LayerShape& shape = layer.config.shape;
    const auto schedule = [&](Direction direction, const Numerics& numerics) {
      return resolve(PartialSchedule(),
                     {.direction = direction, .shape = shape, .numerics = numerics, .machine = group.machine()});
    };
    const Placement placement = place(group, shape, arrays.routings);
    const Saved saved = uniep::forward(group, {shape, forward}, schedule(Direction::kForward, forward), placement,
                                       arrays.forward_arguments());
    uniep::backward(group, {shape, backward}, schedule(Direction::kBackward, backward), saved,
                    arrays.backward_arguments(WeightGradientTime::kNone, false));
  };
  const Numerics plain, oss = numerics_of("swiglu:alpha=1.702,limit=7,up_offset=1");
  const Numerics output = numerics_of("swiglu", RouterWeight::kOutput);
  EXPECT_NO_THROW(run(oss, oss));
  EXPECT_NO_THROW(run(output, output));
  expect_error(Status::kInvalidArgument,
               "activation: swiglu in backward; that forward ran with swiglu:alpha=1.702,limit=7,up_offset=1",
               [&] { run(oss, plain); });
  expect_error(Status::kInvalidArgument, "activation: relu2 in backward; that forward ran with swiglu",
               [&] { run(plain, numerics_of("relu2")); });
  expect_error(Status::kInvalidArgument, "router_weight: activation in backward; that forward ran with output",
               [&] { run(output, plain); });
}

TEST(ActivationRules, WithoutAGateThereIsNoUp) {
  RandomLayer layer = random_layer(3, {.ranks = {2}, .most_local_experts = 4, .fewest_tokens = 4});
  layer.config.numerics = numerics_of("silu");
  GroupOptions options;
  options.engine = EngineKind::kCpu;
  options.ranks = layer.ranks;
  Group group(options);
  LayerArrays arrays(layer);
  const Placement placement = place(group, layer.config.shape, arrays.routings);
  std::vector<ForwardArguments> arguments = arrays.forward_arguments();
  arguments[1].weights.w1_up = arguments[1].weights.w1;
  const Schedule schedule = resolve(PartialSchedule(), {.direction = Direction::kForward,
                                                        .shape = layer.config.shape,
                                                        .numerics = layer.config.numerics,
                                                        .machine = group.machine()});
  expect_error(Status::kInvalidArgument,
               "w1_up: given on rank 1; activation silu has no gate, so that w1 is one matrix",
               [&] { uniep::forward(group, layer.config, schedule, placement, arguments); });
}

TEST(ActivationC, TextsSetTheConfiguration) {
  uniep_layer_config config{};
  config.size = sizeof(config);
  expect_ok(uniep_set_activation(&config, "swiglu:alpha=1.702,limit=7,up_offset=1"));
  EXPECT_EQ(config.activation, UNIEP_ACTIVATION_SWIGLU);
  EXPECT_EQ(config.alpha, 1.702f);
  EXPECT_EQ(config.gate_limit, 7.0f);
  EXPECT_EQ(config.up_limit, 7.0f);
  EXPECT_EQ(config.up_offset, 1.0f);
  expect_ok(uniep_set_activation(&config, "silu"));
  EXPECT_EQ(config.activation, UNIEP_ACTIVATION_SILU);
  EXPECT_EQ(config.gate_limit, 0.0f);
  expect_failure(UNIEP_INVALID_ARGUMENT, "activation: 'mish'; legal are", uniep_set_activation(&config, "mish"));
  expect_failure(UNIEP_INVALID_ARGUMENT, "text: null pointer", uniep_set_activation(&config, nullptr));
  config.size = 64;
  expect_failure(UNIEP_INVALID_ARGUMENT, "config.size: 64; must be ", uniep_set_activation(&config, "silu"));
}

// ---- the functions, beside float64: for every bf16 value, which is what gates are

template <typename Got, typename Exact>
void expect_close(const Got& got, const Exact& exact, double value_limit, double slope_limit, float range = 1e4f) {
  double worst_value = 0, worst_slope = 0;
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float x = to_float(BFloat16{static_cast<uint16_t>(bits)});
    if (!(std::fabs(x) <= range)) continue;
    const CurvePoint point = got(x);
    const reference::Point expected = exact(static_cast<double>(x));
    worst_value =
        std::max(worst_value, std::fabs(point.value - expected.value) / std::max(1e-30, std::fabs(double{x})));
    worst_slope = std::max(worst_slope, std::fabs(point.derivative - expected.derivative));
  }
  std::printf("value %.1e of x, derivative %.1e\n", worst_value, worst_slope);
  EXPECT_LT(worst_value, value_limit);
  EXPECT_LT(worst_slope, slope_limit);
}

TEST(Activations, AreCloserThanBf16CanTell) {
  // Beyond these |x| the CPU's sigmoid stays at its bound.
  expect_close([](float x) { return silu_point(x); }, [](double x) { return reference::silu(x, 1.0); }, 1e-5, 2e-4,
               44.0f);
  expect_close([](float x) { return silu_point(x, 1.702f); },
               [](double x) { return reference::silu(x, double{1.702f}); }, 1e-5, 2e-4, 26.0f);
  expect_close(gelu_tanh_point, reference::gelu_tanh, 2e-5, 5e-5);
  expect_close(gelu_erf_point, reference::gelu_erf, 1e-5, 2e-5);
  expect_close(relu2_point, reference::relu2, 1e-3, 1e-30);
}

// Below zero gelu's values are small, and right to their own size as long as bf16 layers see them.
TEST(Activations, TailsOfGeluKeepTheirDigits) {
  double worst_tanh = 0, worst_erf = 0;
  for (uint32_t bits = 0x8000; bits < 65536; ++bits) {
    const float x = to_float(BFloat16{static_cast<uint16_t>(bits)});
    if (!(x >= -5.0f) || x == 0) continue;
    const double tanh_value = reference::gelu_tanh(x).value, erf_value = reference::gelu_erf(x).value;
    worst_erf = std::max(worst_erf, std::fabs(gelu_erf_point(x).value / erf_value - 1));
    // float64's own 1 + tanh has few digits further out.
    if (x >= -4.0f) worst_tanh = std::max(worst_tanh, std::fabs(gelu_tanh_point(x).value / tanh_value - 1));
  }
  std::printf("tanh %.1e, erf %.1e\n", worst_tanh, worst_erf);
  EXPECT_LT(worst_tanh, 2e-5);
  EXPECT_LT(worst_erf, 2e-5);
}

TEST(Activations, NanGivesNan) {
  const auto check = [](const auto& expert) {
    EXPECT_TRUE(std::isnan(expert.activate(kNan, 1.0f, 0.5f)));
    const ActivationGradient gradient = expert.gradient(kNan, 1.0f, 0.5f, 1.0f);
    EXPECT_TRUE(std::isnan(gradient.activation));
    EXPECT_TRUE(std::isnan(gradient.gate));
  };
  check(ExpertActivation<ActivationKind::kSwiglu>());
  check(ExpertActivation<ActivationKind::kShapedSwiglu>({1.702f, 7.0f, 7.0f, 1.0f}));
  check(ExpertActivation<ActivationKind::kGegluTanh>());
  check(ExpertActivation<ActivationKind::kGegluErf>());
  check(ExpertActivation<ActivationKind::kRelu2>());
  check(ExpertActivation<ActivationKind::kSilu>());
}

}  // namespace
}  // namespace uniep::test
