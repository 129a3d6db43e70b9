#pragma once

#include "model/portability.h"

// The order of a grouped GEMM's tiles, for host (tests) and device. A task is what one cluster does at a time; the CTAs
// of a cluster always have the same number of K blocks to run, so that they can share tiles of B.
namespace uniep::cuda {

struct TilePosition {
  int32_t m_block;
  int32_t n_block;
  bool shared_b;  // the CTAs of the cluster have the same n block and load it together
  bool exists;    // false: this CTA idles along with its neighbour
};

// Pairs of m blocks share an n block. An odd last m block is split along n instead: each CTA takes one of two n blocks.
UNIEP_HOST_DEVICE int32_t task_count(int32_t m_blocks, int32_t n_blocks, int32_t cluster) {
  if (cluster == 1) return m_blocks * n_blocks;
  return m_blocks / 2 * n_blocks + m_blocks % 2 * ((n_blocks + 1) / 2);
}

UNIEP_HOST_DEVICE TilePosition tile_of_task(int32_t task, int32_t m_blocks, int32_t n_blocks, int32_t cluster,
                                            int32_t cta, int32_t raster) {
  const int32_t groups_of_m = m_blocks / cluster;
  const int32_t full_tasks = groups_of_m * n_blocks;
  TilePosition tile;
  if (task >= full_tasks) {
    tile.m_block = m_blocks - 1;
    tile.n_block = 2 * (task - full_tasks) + cta;
    tile.shared_b = false;
    tile.exists = tile.n_block < n_blocks;
    return tile;
  }
  const int32_t band = task / (raster * n_blocks);
  const int32_t in_band = task - band * raster * n_blocks;
  const int32_t left = groups_of_m - band * raster;
  const int32_t height = left < raster ? left : raster;
  tile.n_block = in_band / height;
  tile.m_block = (band * raster + in_band % height) * cluster + cta;
  tile.shared_b = cluster == 2;
  tile.exists = true;
  return tile;
}

}  // namespace uniep::cuda
