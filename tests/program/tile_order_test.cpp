#include "program/tile_order.h"

#include <gtest/gtest.h>

#include <vector>

namespace uniep {
namespace {

// Every tile of an expert is done exactly once, by CTAs that agree on what they share.
bool covers(int m_blocks, int n_blocks, int cluster, int raster) {
  std::vector<int> done(static_cast<size_t>(m_blocks) * static_cast<size_t>(n_blocks), 0);
  const int tasks = task_count(m_blocks, n_blocks, cluster);
  for (int task = 0; task < tasks; ++task) {
    const TilePosition first = tile_of_task(task, 0, {m_blocks, n_blocks, cluster, raster});
    for (int cta = 0; cta < cluster; ++cta) {
      const TilePosition tile = tile_of_task(task, cta, {m_blocks, n_blocks, cluster, raster});
      if (tile.shared_b != first.shared_b || (tile.shared_b && tile.n_block != first.n_block)) return false;
      if (!tile.exists) continue;
      if (tile.m_block < 0 || tile.m_block >= m_blocks || tile.n_block < 0 || tile.n_block >= n_blocks) return false;
      ++done[static_cast<size_t>(tile.m_block) * static_cast<size_t>(n_blocks) + static_cast<size_t>(tile.n_block)];
    }
  }
  for (const int count : done) {
    if (count != 1) return false;
  }
  return true;
}

}  // namespace

TEST(TileOrder, CoversEveryGridOnce) {
  for (int m_blocks = 0; m_blocks <= 23; ++m_blocks) {
    for (int n_blocks = 1; n_blocks <= 9; ++n_blocks) {
      for (int cluster = 1; cluster <= 2; ++cluster) {
        for (const int raster : {1, 2, 3, 8, 16}) {
          EXPECT_TRUE(covers(m_blocks, n_blocks, cluster, raster))
              << m_blocks << " x " << n_blocks << " blocks, cluster " << cluster << ", raster " << raster;
        }
      }
    }
  }
}

}  // namespace uniep
