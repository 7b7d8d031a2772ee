#include "optim/add.h"

#include "base/int64_pairs.h"

namespace shoal {

void Add::step(const Block& block) const noexcept { add_int64(block.grads, block.columns[0], block.size()); }

std::size_t Add::step(const InPlace& rows) const noexcept {
  PrefetchCursor ahead = *rows.ahead;
  with_dim<2, 4, 8, 16>(rows.dim, [&](auto known) SHOAL_ALWAYS {
    const std::size_t dim = known == 0 ? rows.dim : known;
    for (std::size_t r = 0; r < rows.rows.size(); ++r) {
      ahead.next();
      ahead.next_row();
      add_int64(rows.grads + r * dim, reinterpret_cast<float*>(rows.rows[r]), dim);
    }
  });
  *rows.ahead = ahead;
  return 0;
}

}  // namespace shoal
