#pragma once

#include <cstdint>

// Both ends of the model: the embedding of bytes, and the output head with its loss,
//   logits = rms_norm(x) W,  loss = mean over positions of -log softmax(logits)[next byte].
namespace uniep::train {

// out [count, hidden] = the bytes' rows of table [256, hidden].
void embed(const float* table, const uint8_t* bytes, int64_t count, int64_t hidden, float* out);

// Writes table_gradient [256, hidden].
void embed_backward(const uint8_t* bytes, const float* gradient, int64_t count, int64_t hidden, float* table_gradient);

struct HeadWeights {
  const float* norm;        // [H]
  const float* projection;  // [H, 256]
};
struct HeadGradients {
  float* norm;
  float* projection;
};
struct HeadActivations {
  float* normed;         // [T, H]
  float* inverse_rms;    // [T]
  float* probabilities;  // [T, 256]
};

struct HeadForward {
  HeadWeights weights;
  const float* x;          // [T, H]
  const uint8_t* targets;  // [T]
  int64_t tokens, hidden;
  HeadActivations activations;  // written
};
// The sum of the loss over the positions, in nats.
double head_forward(const HeadForward& call);

// For the loss times `scale`.
struct HeadBackward {
  HeadWeights weights;
  const float* transposed;  // the projection as [256, H]
  const float* x;           // [T, H]
  const uint8_t* targets;   // [T]
  int64_t tokens, hidden;
  float scale;
  HeadActivations activations;  // the logits' gradients overwrite the probabilities
  float* x_gradient;            // [T, H], written
  HeadGradients gradients;      // written
  float* scratch;               // [T, H]
};
void head_backward(const HeadBackward& call);

}  // namespace uniep::train
