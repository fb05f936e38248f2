// One function an intrinsic, on memory: of the emulated ones where MLA_EMULATED is defined, else of the processor's.
#ifdef MLA_EMULATED
#include "emulated_simd.h"
#else
#include <immintrin.h>
#endif
#include "tiles.h"

#include <cstdint>

#define BITS(p) _mm512_loadu_si512(p)
#define FLOATS(p) ((__m512)BITS(p))
#define PROBE(name, value) \
  extern "C" void name(const void* a, const void* b, const void* c, void* out) { \
    (void)a, (void)b, (void)c; \
    _mm512_storeu_si512(out, (__m512i)(value)); \
  }

static __m512i doubled(__m256i x) {
  __m256i both[2] = {x, x};
  return _mm512_loadu_si512(both);
}

PROBE(set1_epi32, _mm512_set1_epi32(*static_cast<const int*>(a)))
PROBE(setzero_si512, _mm512_setzero_si512())
PROBE(unpacklo_epi16, _mm512_unpacklo_epi16(BITS(a), BITS(b)))
PROBE(unpackhi_epi16, _mm512_unpackhi_epi16(BITS(a), BITS(b)))
PROBE(unpacklo_epi32, _mm512_unpacklo_epi32(BITS(a), BITS(b)))
PROBE(unpackhi_epi32, _mm512_unpackhi_epi32(BITS(a), BITS(b)))
PROBE(unpacklo_epi64, _mm512_unpacklo_epi64(BITS(a), BITS(b)))
PROBE(unpackhi_epi64, _mm512_unpackhi_epi64(BITS(a), BITS(b)))
PROBE(shuffle_even, _mm512_shuffle_i32x4(BITS(a), BITS(b), 0x88))
PROBE(shuffle_odd, _mm512_shuffle_i32x4(BITS(a), BITS(b), 0xdd))
PROBE(max_ps, _mm512_max_ps(FLOATS(a), FLOATS(b)))
PROBE(reduce_ps, _mm512_reduce_ps(FLOATS(a), _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC))
PROBE(scalef_ps, _mm512_scalef_ps(FLOATS(a), FLOATS(b)))
PROBE(permutex2var_ps, _mm512_permutex2var_ps(FLOATS(a), BITS(b), FLOATS(c)))
PROBE(cvtne2ps_pbh, _mm512_cvtne2ps_pbh(FLOATS(a), FLOATS(b)))
PROBE(cvtph_ps, _mm512_cvtph_ps(*static_cast<const __m256i_u*>(a)))
PROBE(cvtps_ph, doubled(_mm512_cvtps_ph(FLOATS(a), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)))
PROBE(dpbf16_ps, _mm512_dpbf16_ps(FLOATS(a), (__m512bh)BITS(b), (__m512bh)BITS(c)))
// out[rows][columns] += a[rows][2 pairs] b[pairs][2 columns], in tiles of that shape.
extern "C" void tdpbf16ps(const void* a, const void* b, void* out, int rows, int pairs, int columns) {
  struct alignas(64) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } shape;
  shape.rows[0] = shape.rows[6] = uint8_t(rows), shape.rows[4] = uint8_t(pairs);
  shape.bytes[0] = shape.bytes[4] = uint16_t(4 * columns), shape.bytes[6] = uint16_t(4 * pairs);
  tile_configure(&shape);
  tile_load<0>(out, 4 * columns);
  tile_load<6>(a, 4 * pairs);
  tile_load<4>(b, 4 * columns);
  tile_dot<0, 6, 4>();
  tile_store<0>(out, 4 * columns);
  tile_release();
}
