// The engine for processors with tiles (AMX) that multiply bf16.
#include "bf16.h"
#include "divide.h"
#include "narrow.h"
#include "tiles.h"

namespace {

// c[16 M][16 N] = a b, or plus that where `add`.  The rows of a go on in `rest`; b is [features / 2][width][2].  Sums
// are in tiles 0 to 3, right operands in 4 and 5, left ones in 6 and 7.
template <int M, int N>
APART void tile_product(Left a, Left rest, const Bf16* b, int width, float* c, long ldc, bool add) {
  float *c1 = c + 16, *c2 = c + 16 * ldc, *c3 = c2 + 16;
  if (add) {
    tile_load<0>(c, 4 * ldc);
    if constexpr (N == 2) tile_load<1>(c1, 4 * ldc);
    if constexpr (M == 2) tile_load<2>(c2, 4 * ldc);
    if constexpr (M == 2 && N == 2) tile_load<3>(c3, 4 * ldc);
  } else {
    tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  }
  for (int part = 0; part < 2; part++, a = rest)
    for (int f = 0; f < a.features; f += 32, b += 32 * width) {
      tile_load<6>(a.from + f, 2 * a.row);
      tile_load<4>(b, 4 * width);
      tile_dot<0, 6, 4>();
      if constexpr (N == 2) tile_load<5>(b + 32, 4 * width), tile_dot<1, 6, 5>();
      if constexpr (M == 2) tile_load<7>(a.from + 16 * a.row + f, 2 * a.row), tile_dot<2, 7, 4>();
      if constexpr (M == 2 && N == 2) tile_dot<3, 7, 5>();
    }
  tile_store<0>(c, 4 * ldc);
  if constexpr (N == 2) tile_store<1>(c1, 4 * ldc);
  if constexpr (M == 2) tile_store<2>(c2, 4 * ldc);
  if constexpr (M == 2 && N == 2) tile_store<3>(c3, 4 * ldc);
}

struct AnyRows : Narrow<Bf16> {  // tiles take one row in less time than that it is multiplied in lanes
  using Narrow<Bf16>::Narrow;
  static bool takes(Shape, long) { return false; }
};

struct Tiles {
  using Few = AnyRows;
  static constexpr int tile = 256;  // processors that have this have L2 caches of 2 MiB

  Tiles() {  // all eight tiles are 16 rows of 64 bytes, in this thread
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shape;
    tile_configure(&shape);
  }
  ~Tiles() { tile_release(); }  // else every switch of threads goes on saving 8 KiB

  static void scores(Left latent, Left rope, const Bf16* q, int width, float* s) {
    if (width == 32) tile_product<2, 2>(latent, rope, q, 32, s, 32, false);
    else tile_product<2, 1>(latent, rope, q, 16, s, 16, false);
  }
  static void values(int rows, int keys, const Bf16* p, const Bf16* v, float* o, long wide, bool add) {
    const Left a{p, P_ROW, keys}, none{p, 0, 0};
    for (int h = 0; h < rows; h += 32)
      if (rows - h > 16) tile_product<2, 2>(below(a, h), none, v, COLUMNS, o + h * wide, wide, add);
      else tile_product<1, 2>(below(a, h), none, v, COLUMNS, o + h * wide, wide, add);
  }
};

}  // namespace

void attend_amx(const Call& call) { run<PairsOfBf16<Tiles>>(call); }
