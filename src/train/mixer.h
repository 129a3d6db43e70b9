#pragma once

#include <cstdint>

// The causal mixer, the only place where a byte meets earlier ones. For one sequence x [S, H]:
//   u = rms_norm(x),  [v, g] = u W_in,  c[t] = sum over tap j < kMixerTaps of filter[j] * v[t - j],
//   out = x + (c * silu(g)) W_out
// v before the sequence's begin counts as zero.
namespace uniep::train {

struct MixerWeights {
  const float* norm;    // [H]
  const float* in;      // [H, 2 H]: columns of v, then of g
  const float* filter;  // [kMixerTaps, H]
  const float* out;     // [H, H]
};

// What backward needs of one sequence.
struct MixerActivations {
  float* normed;       // [S, H]
  float* inverse_rms;  // [S]
  float* value;        // [S, H]
  float* gate;         // [S, H]
  float* convolved;    // [S, H]
  float* gated;        // [S, H]
};

struct MixerGradients {
  float* norm;
  float* in;
  float* filter;
  float* out;
};

// Floats of scratch memory for one sequence, forward and backward.
int64_t mixer_scratch(int64_t sequence, int64_t hidden);

struct MixerForward {
  MixerWeights weights;
  int64_t sequence, hidden;
  const float* x;                // [S, H]
  MixerActivations activations;  // written
  float* out;                    // [S, H], written
  float* scratch;                // mixer_scratch() floats
};
void mixer_forward(const MixerForward& call);

struct MixerBackward {
  MixerWeights weights;
  MixerWeights transposed;  // in as [2 H, H], out as [H, H]
  int64_t sequence, hidden;
  const float* x;  // [S, H]
  MixerActivations activations;
  float* gradient;           // [S, H] that of `out`, becomes that of x
  MixerGradients gradients;  // written
  float* scratch;            // mixer_scratch() floats
};
void mixer_backward(const MixerBackward& call);

}  // namespace uniep::train
