/* A mixture-of-experts layer over two ranks, forward and backward, from C: once as one overlapped kernel a direction,
 * once stage after stage, with the same bits. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "uniep/c_api.h"

enum { RANKS = 2, TOKENS = 80, HIDDEN = 64, INTERMEDIATE = 32, EXPERTS = 8, TOPK = 2 };
enum {
  LOCAL_EXPERTS = EXPERTS / RANKS,
  X_COUNT = TOKENS * HIDDEN,
  SLOT_COUNT = TOKENS * TOPK,
  W1_COUNT = LOCAL_EXPERTS * 2 * INTERMEDIATE * HIDDEN,
  W2_COUNT = LOCAL_EXPERTS * HIDDEN * INTERMEDIATE
};

/* What one rank holds. */
typedef struct {
  uint16_t x[X_COUNT], dy[X_COUNT], w1[W1_COUNT], w2[W2_COUNT]; /* bf16 */
  int32_t topk_ids[SLOT_COUNT];
  float probs[SLOT_COUNT];
} rank_inputs;

/* What one rank computes. */
typedef struct {
  uint16_t y[X_COUNT], dx[X_COUNT], dw1[W1_COUNT], dw2[W2_COUNT];
  float dprobs[SLOT_COUNT];
} rank_results;

static rank_inputs inputs[RANKS];
static rank_results overlapped[RANKS], sequential[RANKS];

/* Numbers in [-1, 1), as bf16: the upper half of an fp32 value. */
static void fill_random(uint16_t* values, size_t count, uint32_t seed) {
  size_t i;
  for (i = 0; i < count; ++i) {
    float number;
    uint32_t bits;
    seed = seed * 1664525u + 1013904223u;
    number = (float)(seed >> 8) / (1 << 23) - 1.0f;
    memcpy(&bits, &number, sizeof(bits));
    values[i] = (uint16_t)(bits >> 16);
  }
}

static void fill_inputs(void) {
  uint32_t rank;
  int32_t token;
  for (rank = 0; rank < RANKS; ++rank) {
    fill_random(inputs[rank].x, X_COUNT, 10 + rank);
    fill_random(inputs[rank].dy, X_COUNT, 20 + rank);
    fill_random(inputs[rank].w1, W1_COUNT, 30 + rank);
    fill_random(inputs[rank].w2, W2_COUNT, 40 + rank);
    for (token = 0; token < TOKENS; ++token) {
      const int32_t first = (5 * token + (int32_t)rank) % EXPERTS;
      inputs[rank].topk_ids[token * TOPK] = first;
      inputs[rank].topk_ids[token * TOPK + 1] = (first + 1 + token % 3) % EXPERTS;
      inputs[rank].probs[token * TOPK] = 0.75f;
      inputs[rank].probs[token * TOPK + 1] = 0.25f;
    }
  }
}

/* Every call returns a status; the message of the last failure is kept for each thread. */
static void check(uniep_status status) {
  if (status == UNIEP_OK) return;
  fprintf(stderr, "%s: %s\n", uniep_status_name(status), uniep_last_error());
  exit(EXIT_FAILURE);
}

static void run(uniep_group* group, const char* schedule, rank_results* results) {
  /* Fields that are not named are zero: their defaults. */
  const uniep_layer_config config = {
      .size = sizeof(config), .hidden = HIDDEN, .intermediate = INTERMEDIATE, .experts = EXPERTS, .topk = TOPK};
  uniep_routing routings[RANKS];
  uniep_weights weights[RANKS];
  uniep_weight_gradients gradients[RANKS];
  uniep_forward_arguments forward[RANKS];
  uniep_backward_arguments backward[RANKS];
  uniep_placement* placement;
  uniep_saved* saved;
  int rank;
  for (rank = 0; rank < RANKS; ++rank) {
    const rank_inputs* in = &inputs[rank];
    rank_results* out = &results[rank];
    routings[rank] =
        (uniep_routing){.size = sizeof(uniep_routing), .tokens = TOKENS, .topk_ids = in->topk_ids, .probs = in->probs};
    weights[rank] = (uniep_weights){.size = sizeof(uniep_weights), .w1 = in->w1, .w2 = in->w2};
    gradients[rank] =
        (uniep_weight_gradients){.size = sizeof(uniep_weight_gradients), .dw1 = out->dw1, .dw2 = out->dw2};
    forward[rank] = (uniep_forward_arguments){
        .size = sizeof(uniep_forward_arguments), .x = in->x, .weights = &weights[rank], .y = out->y};
    backward[rank] = (uniep_backward_arguments){.size = sizeof(uniep_backward_arguments),
                                                .dy = in->dy,
                                                .weights = &weights[rank],
                                                .dx = out->dx,
                                                .dprobs = out->dprobs,
                                                .gradients = &gradients[rank]};
  }
  check(uniep_place(group, &config, routings, RANKS, NULL, &placement));
  check(uniep_forward(group, &config, schedule, placement, forward, RANKS, &saved));
  check(uniep_backward(group, &config, schedule, saved, backward, RANKS, NULL));
  uniep_saved_destroy(saved);
  uniep_placement_destroy(placement);
}

int main(void) {
  const uniep_group_options options = {.size = sizeof(options), .engine = UNIEP_ENGINE_CPU, .ranks = RANKS};
  uniep_group* group;
  fill_inputs();
  check(uniep_group_create(&options, &group));
  memset(overlapped, 0xff, sizeof(overlapped));
  run(group, "fusion=layer", overlapped);
  run(group, "{\"fusion\": \"none\"}", sequential);
  uniep_group_destroy(group);
  if (memcmp(overlapped, sequential, sizeof(overlapped)) != 0) {
    fprintf(stderr, "the overlapped run differs from the sequential one\n");
    return EXIT_FAILURE;
  }
  printf("%d ranks, %d tokens each: y, dx, dprobs, dw1 and dw2 have the same bits\n", RANKS, TOKENS);
  return EXIT_SUCCESS;
}
