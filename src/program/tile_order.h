#pragma once

#include "model/portability.h"
#include "program/namespace.h"

// The order of a grid of tiles. A task is what one cluster does at a time; the CTAs of a cluster always have the same
// number of K blocks to run, so that they can share tiles of B.
namespace uniep::program {

struct TilePosition {
  int32_t m_block;
  int32_t n_block;
  bool shared_b;  // the CTAs of the cluster have the same n block and load it together
  bool exists;    // false: this CTA idles along with its neighbour
};

struct TileGrid {
  int32_t m_blocks;
  int32_t n_blocks;
  int32_t cluster;
  int32_t raster;
};

// Pairs of m blocks share an n block. An odd last m block is split along n instead: each CTA takes one of two n blocks.
UNIEP_HOST_DEVICE int32_t task_count(int32_t m_blocks, int32_t n_blocks, int32_t cluster) {
  if (cluster == 1) return m_blocks * n_blocks;
  return m_blocks / 2 * n_blocks + m_blocks % 2 * ((n_blocks + 1) / 2);
}

// Bands of `raster` pairs (or blocks) of m, n ascending inside a band, so that what runs side by side shares tiles of B
// and A in L2. The split last m block runs right after the pairs of the last band that read the same two n blocks.
UNIEP_HOST_DEVICE TilePosition tile_of_task(int32_t task, int32_t cta, TileGrid grid) {
  const int32_t m_blocks = grid.m_blocks, n_blocks = grid.n_blocks, cluster = grid.cluster, raster = grid.raster;
  const int32_t groups = m_blocks / cluster;
  const bool has_split = m_blocks % cluster != 0;
  const int32_t last_band = groups == 0 ? 0 : (groups - 1) / raster;
  const int32_t band = task / (raster * n_blocks) < last_band ? task / (raster * n_blocks) : last_band;
  const int32_t in_band = task - band * raster * n_blocks;
  const int32_t left = groups - band * raster;
  const int32_t height = left < raster ? left : raster;
  TilePosition tile;
  int32_t column = in_band;  // n block * height + position in the band
  if (has_split && band == last_band) {
    const int32_t pair = in_band / (2 * height + 1);
    const int32_t in_pair = in_band - pair * (2 * height + 1);
    column = 2 * pair * height + in_pair;
    if (in_pair == 2 * height || column >= n_blocks * height) {
      tile.m_block = m_blocks - 1;
      tile.n_block = 2 * pair + cta;
      tile.shared_b = false;
      tile.exists = tile.n_block < n_blocks;
      return tile;
    }
  }
  tile.n_block = column / height;
  tile.m_block = (band * raster + column % height) * cluster + cta;
  tile.shared_b = cluster == 2;
  tile.exists = true;
  return tile;
}

}  // namespace uniep::program
