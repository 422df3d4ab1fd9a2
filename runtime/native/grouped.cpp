// One expert times many tokens, in bf16: tokens lie side by side in the lanes of registers, and weights are read from
// where they lie. Torch's own products lay the weights out anew for every 256 tokens, which costs a fifth of the time.
#include <omp.h>

#include <algorithm>

#include "vector.h"

#if defined(HRM_BF16_DOT)

using namespace hrm;

namespace {

constexpr int LANES = 2 * W;    // tokens side by side
constexpr int RECORDS = 6;      // rows of an expert at a time: gate and up of each for all lanes stay in registers
constexpr int TILE = 12;        // columns of the answer at a time: as many sums
constexpr int COLUMNS = 96;     // columns of down rows that lie together
constexpr int64_t CHUNK = 1024;  // rows of an expert between its two halves of work
static_assert(COLUMNS % TILE == 0 && CHUNK % RECORDS % 2 == 0);

// Scratch memory, laid out so that what is used together lies together. Pairs are two bf16 in 32 bits.
struct Scratch {
  int64_t panels;   // of LANES tokens
  int32_t* x;       // pairs of columns [panels][h / 2][LANES]
  int32_t* inner;   // pairs of rows of a chunk: what down rows are multiplied with [panels][CHUNK / 2][LANES]
  int32_t* down;    // pairs of down rows of a chunk [h / COLUMNS][CHUNK / 2][COLUMNS]
  float* sums;      // [h / COLUMNS][panels][COLUMNS][LANES]
  float* weights;   // [panels][LANES]
  int64_t bytes = 0;
  Scratch(int64_t visits, int64_t h, char* memory) : panels(round_up(visits, LANES) / LANES) {
    const auto take = [&](auto*& part, int64_t n) {  // every part is a multiple of a cache line
      part = reinterpret_cast<std::decay_t<decltype(part)>>(memory ? memory + bytes : nullptr);
      bytes += n * 4;
    };
    take(x, panels * LANES * h / 2);
    take(inner, panels * LANES * CHUNK / 2);
    take(down, round_up(h, COLUMNS) * CHUNK / 2);
    take(sums, round_up(h, COLUMNS) * panels * LANES);
    take(weights, panels * LANES);
  }
};

[[gnu::always_inline]] inline vf pair_at(const char* p) {
  int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return (vf)_mm512_set1_epi32(pair);
}

[[gnu::always_inline]] inline __m512i pairs_of(vf low, vf high) {
  const __m512i a = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)low));
  const __m512i b = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)high));
  return _mm512_or_si512(a, _mm512_slli_epi32(b, 16));
}

// Gate and up products of N rows (N is 2 or 6; `alone`: the second of two is none) for V vectors of tokens, and what
// their down rows are multiplied with.
template <int V, int N>
[[gnu::flatten]] void enter(const bf16* rows, int64_t h, bool alone, const int32_t* x, const float* weights,
                            const bf16* ahead, int32_t* inner) {
  vf gates[N * V], ups[N * V];
  unroll<N * V>([&](auto i) { gates[i] = ups[i] = vf{}; });
  const int64_t row = h * sizeof(bf16), record = alone ? 0 : 3 * row;
  const char *gate = (const char*)rows, *next = (const char*)ahead;
  for (int64_t c = 0; c < row; c += 64, gate += 64) {
    if (next) {
      unroll<N>([&](auto r) {
        unroll<3>([&](auto i) { prefetch(next + c + r * 3 * row + i * row); });
      });
    }
    for (int p = 0; p < 64; p += 4, x += LANES) {
      vf z[V];
      unroll<V>([&](auto v) { z[v] = (vf)_mm512_loadu_si512(x + v * W); });
      const char* at = gate + p;
      unroll<N>([&](auto r) {
        const vf a = pair_at(at + r * record), b = pair_at(at + r * record + row);
        unroll<V>([&](auto v) {
          gates[r * V + v] = Pairs::add(gates[r * V + v], z[v], a);
          ups[r * V + v] = Pairs::add(ups[r * V + v], z[v], b);
        });
      });
    }
  }
  unroll<V>([&](auto v) {
    const vf weight = load(weights + v * W);
    const auto factor = [&](int i) {
      return gates[i] / (splat(1.0f) + exp2(gates[i] * splat(-1.44269504088896341f))) * ups[i] * weight;
    };
    unroll<N / 2>([&](auto k) {
      const vf second = alone ? vf{} : factor((2 * k + 1) * V + v);
      _mm512_storeu_si512(inner + k * LANES + v * W, pairs_of(factor(2 * k * V + v), second));
    });
  });
}

// sums [N][LANES] += (or, first: =) N columns of down rows times what V vectors of tokens bring.
template <int V, int N>
[[gnu::flatten]] void leave(const int32_t* down, int64_t pairs, const int32_t* inner, float* sums, bool first) {
  vf found[N * V];
  unroll<N>([&](auto r) {
    unroll<V>([&](auto v) { found[r * V + v] = first ? vf{} : load(sums + r * LANES + v * W); });
  });
  for (int64_t p = 0; p < pairs; p++, down += COLUMNS, inner += LANES) {
    vf z[V];
    unroll<V>([&](auto v) { z[v] = (vf)_mm512_loadu_si512(inner + v * W); });
    unroll<N>([&](auto r) {
      const vf w = pair_at((const char*)(down + r));
      unroll<V>([&](auto v) { found[r * V + v] = Pairs::add(found[r * V + v], z[v], w); });
    });
  }
  unroll<N>([&](auto r) {
    unroll<V>([&](auto v) { store(sums + r * LANES + v * W, found[r * V + v]); });
  });
}

// f with 1 or 2: vectors of tokens that are there in a panel.
template <class F>
inline void by_vectors(int64_t tokens, F&& f) {
  if (tokens > W) f(std::integral_constant<int, 2>{});
  else f(std::integral_constant<int, 1>{});
}

// Tokens of a panel side by side.
void lay_side_by_side(const bf16* x, const int64_t* tokens, int64_t count, int64_t h, int32_t* panel) {
  for (int64_t c = 0; c < h / 2; c += 16)
    for (int64_t t = 0; t < LANES; t++) {
      int32_t pairs[16] = {};
      if (t < count) std::memcpy(pairs, x + tokens[t] * h + 2 * c, sizeof pairs);
      for (int k = 0; k < 16; k++) panel[(c + k) * LANES + t] = pairs[k];
    }
}

// Down rows r and r + 1 in pairs.
void lay_in_pairs(const bf16* a, const bf16* b, int64_t h, int32_t* down) {
  for (int64_t c = 0; c < h; c += COLUMNS)
    for (int64_t k = 0; k < std::min<int64_t>(COLUMNS, h - c); k += W) {
      const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(a + c + k)));
      const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(b + c + k)));
      _mm512_storeu_si512(down + c / COLUMNS * (CHUNK / 2) * COLUMNS + k, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
}

}  // namespace

extern "C" {

// Bytes of scratch memory for so many visits of tokens [h]; 0 where hrm_multiply_expert can not do the work.
int64_t hrm_expert_scratch(int64_t visits, int64_t h) { return h % 32 ? 0 : Scratch(visits, h, nullptr).bytes; }

// out [.., h] += one expert's answers to some tokens of x [.., h], each times its weight. Rows [n][3][h] in pieces.
void hrm_multiply_expert(const void* x, const void* const* pieces, const int64_t* counts, int64_t n_pieces,
                         const int64_t* tokens, const float* weights, int64_t visits, float* out, int64_t h,
                         void* scratch, int threads) {
  Scratch s(visits, h, static_cast<char*>(scratch));
  const int64_t blocks = round_up(h, COLUMNS) / COLUMNS;
  const auto there = [&](int64_t panel) { return std::min<int64_t>(LANES, visits - panel * LANES); };
  bool first = true;
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(dynamic)
    for (int64_t panel = 0; panel < s.panels; panel++) {
      lay_side_by_side(static_cast<const bf16*>(x), tokens + panel * LANES, there(panel), h,
                       s.x + panel * LANES * h / 2);
      for (int64_t t = 0; t < LANES; t++)
        s.weights[panel * LANES + t] = t < there(panel) ? weights[panel * LANES + t] : 0.0f;
    }
    for (int64_t piece = 0; piece < n_pieces; piece++)
      for (int64_t start = 0; start < counts[piece]; start += CHUNK) {
        const bf16* const rows = static_cast<const bf16*>(pieces[piece]) + start * 3 * h;
        const int64_t count = std::min(CHUNK, counts[piece] - start), pairs = (count + 1) / 2;
        const int64_t whole = count / RECORDS, groups = whole + (count % RECORDS + 1) / 2;
#pragma omp for schedule(dynamic, 4)
        for (int64_t g = 0; g < groups; g++) {
          const int64_t r = g < whole ? g * RECORDS : whole * RECORDS + (g - whole) * 2;
          const bf16* const here = rows + r * 3 * h;
          const bool alone = r + 1 == count;
          for (int64_t panel = 0; panel < s.panels; panel++)
            by_vectors(there(panel), [&](auto v) {
              const auto call = g < whole ? enter<v(), RECORDS> : enter<v(), 2>;
              call(here, h, alone, s.x + panel * LANES * h / 2, s.weights + panel * LANES,
                   panel == 0 ? here + RECORDS * 3 * h : nullptr,
                   s.inner + (panel * CHUNK / 2 + r / 2) * LANES);
            });
          for (int64_t i = r; i < std::min(count, r + (g < whole ? RECORDS : 2)); i += 2) {
            const bf16* const down = rows + i * 3 * h + 2 * h;
            lay_in_pairs(down, i + 1 < count ? down + 3 * h : down, h, s.down + i / 2 * COLUMNS);
          }
        }
#pragma omp for schedule(dynamic, 4)
        for (int64_t i = 0; i < blocks * s.panels; i++) {
          const int64_t block = i / s.panels, panel = i % s.panels;
          const int32_t* const down = s.down + block * (CHUNK / 2) * COLUMNS;
          const int32_t* const inner = s.inner + panel * CHUNK / 2 * LANES;
          float* const sums = s.sums + i * COLUMNS * LANES;
          const int64_t columns = std::min<int64_t>(COLUMNS, h - block * COLUMNS);
          by_vectors(there(panel), [&](auto v) {
            int64_t c = 0;
            for (; c + TILE <= columns; c += TILE) leave<v(), TILE>(down + c, pairs, inner, sums + c * LANES, first);
            for (; c < columns; c += 4) leave<v(), 4>(down + c, pairs, inner, sums + c * LANES, first);
          });
        }
#pragma omp single
        first = false;
      }
#pragma omp for schedule(static)
    for (int64_t panel = 0; panel < s.panels; panel++)
      for (int64_t block = 0; block < blocks; block++) {
        const float* const sums = s.sums + (block * s.panels + panel) * COLUMNS * LANES;
        const int64_t columns = std::min<int64_t>(COLUMNS, h - block * COLUMNS);
        for (int64_t t = 0; t < there(panel); t++) {
          float* const to = out + tokens[panel * LANES + t] * h + block * COLUMNS;
          for (int64_t c = 0; c < columns; c++) to[c] += sums[c * LANES + t];
        }
      }
  }
}
}

#else

extern "C" {
int64_t hrm_expert_scratch(int64_t, int64_t) { return 0; }
void hrm_multiply_expert(const void*, const void* const*, const int64_t*, int64_t, const int64_t*, const float*,
                         int64_t, float*, int64_t, void*, int) {}
}

#endif
