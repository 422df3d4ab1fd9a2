// Few tokens times many weights: the experts of a layer, and a linear layer. Every weight is read once, from where it
// lies and in the order in which it lies, and multiplied with all tokens that want it while it is in the cache.
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "vector.h"

using namespace hrm;

namespace {

constexpr int ROWS = 4;  // rows of weights at a time, at most
#if defined(HRM_AVX512)
constexpr int TOKENS = 6;  // tokens at a time: ROWS x TOKENS sums stay in registers
constexpr int VISITS = 12;  // visits of an expert at a time: gate and up, or two vectors of its answer, for each
constexpr int SIDE_BY_SIDE = 12;  // tokens of a linear layer above which they lie side by side in the lanes
constexpr int FEW = 5;  // so few visits need the rows of two records to keep the multipliers busy
#else
constexpr int TOKENS = 2;
constexpr int VISITS = 4;
constexpr int FEW = 2;
#endif
constexpr int PANEL = 2 * W;          // columns of sums at a time
constexpr int BLOCK = 32;             // rows of an expert between the two halves of its work, at most
constexpr int64_t LINE = 64;          // bytes of a cache line
constexpr int64_t LARGEST = 1 << 18;  // bytes of a block: it shares the second cache with the next, tokens and sums
static_assert(BLOCK % W == 0 && 2 * TOKENS == VISITS);

// out[token * stride + 0..R-1] = the products of R rows with N tokens. Meanwhile memory that is read next is asked for,
// LINES with each step: on its own it would be idle while the multipliers work.
template <class How, int N, int R, int LINES, class T, class X>
[[gnu::flatten]] inline void dot_rows(const T* const* rows, const char* ahead, const X* const* x, int64_t h,
                                      float* out, int64_t stride) {
  vf sums[N * R];
  unroll<N * R>([&](auto i) { sums[i] = vf{}; });
  int64_t c = 0;
  for (; c + How::step <= h; c += How::step) {
    vf y[R];
    unroll<R>([&](auto r) { y[r] = How::get(rows[r] + c); });
    unroll<LINES>([&](auto i) { prefetch(ahead + i * LINE); });
    ahead += LINES * LINE;
    unroll<N>([&](auto t) {
      const vf z = How::get(x[t] + c);
      unroll<R>([&](auto r) { sums[t * R + r] = How::add(sums[t * R + r], y[r], z); });
    });
  }
  float four[4];
  if constexpr (R == 4)
    unroll<N>([&](auto t) {
      sum4(sums[t * 4], sums[t * 4 + 1], sums[t * 4 + 2], sums[t * 4 + 3], out + t * stride);
    });
  else {
    static_assert(R == 2);
    unroll<N / 2>([&](auto k) {
      constexpr int t = 2 * k;
      sum4(sums[t * 2], sums[t * 2 + 1], sums[t * 2 + 2], sums[t * 2 + 3], four);
      std::memcpy(out + t * stride, four, 2 * sizeof(float));
      std::memcpy(out + (t + 1) * stride, four + 2, 2 * sizeof(float));
    });
    if constexpr (N % 2) {
      sum4(sums[N * 2 - 2], sums[N * 2 - 1], vf{}, vf{}, four);
      std::memcpy(out + (N - 1) * stride, four, 2 * sizeof(float));
    }
  }
  for (; c < h; c++)
    for (int t = 0; t < N; t++)
      for (int r = 0; r < R; r++) out[t * stride + r] += widen(rows[r][c]) * widen(x[t][c]);
}

// f with the first of some tokens, and their number (at most MOST) as a constant; groups about equally large.
template <int MOST, class F>
inline void by_tokens(int64_t tokens, F&& f) {
  const int64_t groups = (tokens + MOST - 1) / MOST;
  for (int64_t g = 0; g < groups; g++) {
    const int64_t first = tokens * g / groups, count = tokens * (g + 1) / groups - first;
    unroll<MOST>([&](auto n) {
      if (count == n + 1) f(first, std::integral_constant<int, n + 1>{});
    });
  }
}

// A panel, two vectors of columns of the sums of all tokens, grows by `factors` times `count` rows, for N tokens that
// lie at `places` in the panel. Widened: columns in order, factors float32.
template <int N, int LINES, class T>
[[gnu::flatten]] inline void add_columns(const T* rows, int64_t stride, int count, const float* factors,
                                         const int64_t* places, float* panel, const char*& ahead) {
  const char* at = ahead;
  vf sums[N * 2];
  unroll<N>([&](auto t) { unroll<2>([&](auto i) { sums[t * 2 + i] = load(panel + places[t] + i * W); }); });
  for (int r = 0; r < count; r++) {
    const vf a = load(rows + r * stride), b = load(rows + r * stride + W);
    unroll<LINES>([&](auto i) { prefetch(at + i * LINE); });
    at += LINES * LINE;
    unroll<N>([&](auto t) {
      const vf factor = splat(factors[t * BLOCK + r]);
      sums[t * 2] += factor * a;
      sums[t * 2 + 1] += factor * b;
    });
  }
  ahead = at;
  unroll<N>([&](auto t) { unroll<2>([&](auto i) { store(panel + places[t] + i * W, sums[t * 2 + i]); }); });
}

#if defined(HRM_BF16_DOT)
// The same with factors in bf16, two rows per instruction; of 32 columns the first vector gets 0-3, 8-11, ..., the
// second 4-7, 12-15, ... (add_in_order puts that right).
template <int N, int LINES>
[[gnu::flatten]] inline void add_pairs(const bf16* rows, int64_t stride, int count, const bf16* factors,
                                       const int64_t* places, float* panel, const char*& ahead) {
  const char* at = ahead;
  vf sums[N * 2];
  unroll<N>([&](auto t) { unroll<2>([&](auto i) { sums[t * 2 + i] = load(panel + places[t] + i * W); }); });
  for (int r = 0; r < count; r += 2) {
    const __m512i a = _mm512_loadu_si512(rows + r * stride);
    const __m512i b = _mm512_loadu_si512(rows + (r + 1 < count ? r + 1 : r) * stride);  // factor 0 past the end
    unroll<LINES>([&](auto i) { prefetch(at + i * LINE); });
    at += LINES * LINE;
    const vf low = (vf)_mm512_unpacklo_epi16(a, b), high = (vf)_mm512_unpackhi_epi16(a, b);
    unroll<N>([&](auto t) {
      int32_t pair;
      std::memcpy(&pair, factors + t * BLOCK + r, sizeof pair);
      const vf factor = (vf)_mm512_set1_epi32(pair);
      sums[t * 2] = Pairs::add(sums[t * 2], low, factor);
      sums[t * 2 + 1] = Pairs::add(sums[t * 2 + 1], high, factor);
    });
  }
  ahead = at;
  unroll<N>([&](auto t) { unroll<2>([&](auto i) { store(panel + places[t] + i * W, sums[t * 2 + i]); }); });
}
#endif

struct Segment {
  const void* rows;  // [count][3][h]
  int64_t count;
  const int64_t* tokens;  // of the visits of its expert
  const float* weights;
  int64_t visits;
};

struct Unit {
  const Segment* segment;
  int64_t first, count;
};

// silu(gate) * up * weight
inline vf gate_and_weigh(vf gate, vf up, float weight) {
  return gate / (splat(1.0f) + exp2(gate * splat(-1.44269504088896341f))) * up * splat(weight);
}

inline const char* bytes_at(const void* p) { return static_cast<const char*>(p); }

// What one thread needs for segments of at most `visits` visits.
template <class X>
struct Visits {
  std::vector<const X*> x;
  std::vector<int64_t> places;  // of the sums in a panel
  Buffer<float> dots, factors;  // gate and up products of each row in turn; what its down row is multiplied with
  Buffer<bf16> pairs;
  explicit Visits(int64_t visits)
      : x(visits), places(visits), dots(visits * BLOCK * 2), factors(visits * BLOCK),
        pairs(visits * BLOCK) {}
};

// One block of an expert: gate and up products of its rows, then its down rows added to the sums of the tokens. In the
// first half the record after next work is asked for with each, whole, since it lies in one piece; in the second half
// the first records of the next block. Farther ahead, lines are thrown out of the first cache before they are needed,
// and take the place of misses that are.
template <class How, class T, class X>
void apply_block(const T* rows, int count, int64_t h, const Segment& segment, Visits<X>& visits, float* sums,
                 int64_t tokens, const T* following) {
  const auto record = [&](int r) { return r < count ? rows + r * 3 * h : following + (r - count) * 3 * h; };
  constexpr int lines = (3 * How::step * sizeof(T) + LINE - 1) / LINE;  // of a record, with each step through a row
  for (int i = 0; i < count; i += 2)
    by_tokens<VISITS>(segment.visits, [&](int64_t t, auto n) {
      const T* const a = record(i);
      const T* const b = i + 1 < count ? record(i + 1) : a;  // of an odd number the last stands in for none
      const T* const four[ROWS] = {a, a + h, b, b + h};
      float* const out = visits.dots.data + (t * BLOCK + i) * 2;
      const X* const* const x = visits.x.data() + t;
      const auto dot = [&](auto records, int first) {
        constexpr int R = 2 * records(), N = n();
        const char* const ahead = bytes_at(record(i + first + records()));
        const T* const* const each = four + 2 * first;
        if (t == 0) dot_rows<How, N, R, records() * lines>(each, ahead, x, h, out + 2 * first, 2 * BLOCK);
        else dot_rows<How, N, R, 0>(each, ahead, x, h, out + 2 * first, 2 * BLOCK);
      };
      if constexpr (n() <= FEW) dot(std::integral_constant<int, 2>{}, 0);
      else {
        dot(std::integral_constant<int, 1>{}, 0);
        if (i + 1 < count) dot(std::integral_constant<int, 1>{}, 1);
      }
    });
  for (int64_t t = 0; t < segment.visits; t++) {
    const float* const dots = visits.dots.data + t * 2 * BLOCK;
    float* const factors = visits.factors.data + t * BLOCK;
    alignas(64) float gates[BLOCK], ups[BLOCK];
    for (int r = 0; r < BLOCK; r++) gates[r] = dots[2 * r], ups[r] = dots[2 * r + 1];
    for (int r = count; r < BLOCK; r++) gates[r] = ups[r] = 0;
    for (int r = 0; r < count; r += W) {
      const vf factor = gate_and_weigh(load(gates + r), load(ups + r), segment.weights[t]);
      store(factors + r, factor);
#if defined(HRM_BF16_DOT)
      if constexpr (How::step == PANEL) {
        const __m256bh pairs = _mm512_cvtneps_pbh((__m512)factor);
        std::memcpy(visits.pairs.data + t * BLOCK + r, &pairs, sizeof pairs);
      }
#endif
    }
  }
  const T* const down = rows + 2 * h;
  const char* ahead = bytes_at(following + 3 * h);
  int64_t c = 0;
  for (; c + PANEL <= h; c += PANEL) {
    by_tokens<VISITS>(segment.visits, [&](int64_t t, auto n) {
      const auto add = [&](auto lines) {
#if defined(HRM_BF16_DOT)
        if constexpr (How::step == PANEL)
          add_pairs<n(), lines()>(down + c, 3 * h, count, visits.pairs.data + t * BLOCK, visits.places.data() + t,
                                  sums + c * tokens, ahead);
        else
#endif
          add_columns<n(), lines()>(down + c, 3 * h, count, visits.factors.data + t * BLOCK, visits.places.data() + t,
                                    sums + c * tokens, ahead);
      };
      if (t == 0) add(std::integral_constant<int, 1>{});
      else add(std::integral_constant<int, 0>{});
    });
  }
  for (int64_t i = 0; c + i < h; i++)
    for (int64_t t = 0; t < segment.visits; t++)
      for (int r = 0; r < count; r++)
        sums[c * tokens + visits.places[t] + i] += visits.factors.data[t * BLOCK + r] * widen(down[r * 3 * h + c + i]);
}

#if defined(HRM_BF16_DOT)
// out[0..31] += sums as add_pairs leaves them.
inline void add_in_order(const float* sums, float* out) {
  const __m512 a = (__m512)load(sums), b = (__m512)load(sums + W);
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  store(out, load(out) + (vf)_mm512_permutex2var_ps(a, first, b));
  store(out + W, load(out + W) + (vf)_mm512_permutex2var_ps(a, second, b));
}
#endif

template <class How, class T, class X>
void apply(const std::vector<Segment>& segments, const X* x, float* out, int64_t tokens, int64_t h, int threads) {
  int64_t rows = 0, most_visits = 0;
  for (const Segment& segment : segments) rows += segment.count, most_visits = std::max(most_visits, segment.visits);
  const int64_t record = 3 * h * static_cast<int64_t>(sizeof(T)), width = round_up(h, PANEL);
  const int64_t size = std::min<int64_t>(128, round_up(rows / (16 * threads) + 1, BLOCK));
  int64_t step = BLOCK;
  while (step > 8 && record * step > LARGEST) step /= 2;
  std::vector<Unit> units;
  for (const Segment& segment : segments)
    for (int64_t i = 0; i < segment.count; i += size) units.push_back({&segment, i, std::min(size, segment.count - i)});
  // Threads take groups of units in turn. Each group has sums of its own, added up in order at the end: so a result
  // does not depend on who came first. As many groups as cost little beside the weights, up to four per thread.
  const int64_t n = static_cast<int64_t>(units.size());
  const int64_t sums_bytes = tokens * width * static_cast<int64_t>(sizeof(float));
  const int64_t per_thread = std::clamp<int64_t>(rows * record / (32 * threads * sums_bytes), 1, 4);
  const int64_t groups = std::min(n, threads * per_thread);
  Buffer<float> all_sums(groups * tokens * width);  // [groups][panels][tokens][PANEL]
  std::atomic<int64_t> counter{0};
#pragma omp parallel num_threads(threads)
  {
    Visits<X> visits(most_visits);
    int64_t group = counter.fetch_add(1);
    while (group < groups) {
      const int64_t next_group = counter.fetch_add(1);  // taken now, so that it can be asked for in time
      float* const sums = all_sums.data + group * tokens * width;
      std::memset(sums, 0, sums_bytes);
      const int64_t first = n * group / groups, last = n * (group + 1) / groups;
      for (int64_t i = first; i < last; i++) {
        const Unit& unit = units[i];
        const Unit* next = nullptr;
        if (i + 1 < last) next = &units[i + 1];
        else if (next_group < groups) next = &units[n * next_group / groups];
        const Segment& segment = *unit.segment;
        for (int64_t t = 0; t < segment.visits; t++) {
          visits.x[t] = x + segment.tokens[t] * h;
          visits.places[t] = segment.tokens[t] * PANEL;
        }
        const auto row = [h](const Unit& of, int64_t r) {
          return static_cast<const T*>(of.segment->rows) + (of.first + r) * 3 * h;
        };
        for (int64_t r = 0; r < unit.count; r += step) {
          const T* const rows = row(unit, r);
          const T* const following = r + step < unit.count ? row(unit, r + step) : next ? row(*next, 0) : rows;
          const int count = static_cast<int>(std::min(step, unit.count - r));
          apply_block<How>(rows, count, h, segment, visits, sums, tokens, following);
        }
      }
      group = next_group;
    }
#pragma omp barrier
    // Each thread adds up its own columns of all tokens: no two write the same place.
    const int64_t team = omp_get_num_threads(), me = omp_get_thread_num(), panels = width / PANEL;
    for (int64_t p = panels * me / team; p < panels * (me + 1) / team; p++)
      for (int64_t g = 0; g < groups; g++)
        for (int64_t t = 0; t < tokens; t++) {
          const float* const from = all_sums.data + ((g * panels + p) * tokens + t) * PANEL;
          float* const to = out + t * h + p * PANEL;
#if defined(HRM_BF16_DOT)
          if constexpr (How::step == PANEL) add_in_order(from, to);
          else
#endif
            for (int64_t c = 0; c < std::min<int64_t>(PANEL, h - p * PANEL); c++) to[c] += from[c];
        }
  }
}

inline void write(float x, void* out, int dtype, int64_t at) {
  if (dtype == FP32) narrow(x, static_cast<float*>(out) + at);
  else if (dtype == BF16) narrow(x, static_cast<bf16*>(out) + at);
  else narrow(x, static_cast<fp16*>(out) + at);
}

template <class T>
void widen_all(const void* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; i++) to[i] = widen(static_cast<const T*>(from)[i]);
}

// Tokens in float32, in `kept` unless they are already.
const float* widened(const void* x, int dtype, int64_t n, Buffer<float>& kept) {
  if (dtype == FP32) return static_cast<const float*>(x);
  if (dtype == BF16) widen_all<bf16>(x, n, kept.data);
  else widen_all<fp16>(x, n, kept.data);
  return kept.data;
}

// Units of rows of weights [n, h] for threads to take in turn: f(first row, last row, first of what is next).
template <class F>
void by_rows(int64_t n, int threads, int64_t multiple, F&& f) {
  std::atomic<int64_t> counter{0};
  const int64_t size = std::min<int64_t>(96, round_up(n / (16 * threads) + 1, multiple)), units = (n + size - 1) / size;
#pragma omp parallel num_threads(threads)
  {
    int64_t i = counter.fetch_add(1);
    while (i < units) {
      const int64_t following = counter.fetch_add(1);  // taken now, so that it can be asked for in time
      f(i * size, std::min(n, (i + 1) * size), following < units ? following * size : i * size);
      i = following;
    }
  }
}

// Four rows at a time of weights [n, h], for all tokens.
template <class How, class T, class X>
void multiply(const X* x, const T* weights, const float* bias, void* out, int out_dtype, int64_t tokens, int64_t n,
              int64_t h, int threads) {
  constexpr int lines = (ROWS * How::step * sizeof(T) + LINE - 1) / LINE;  // of four rows, with each step through them
  std::vector<const X*> each(tokens);
  for (int64_t t = 0; t < tokens; t++) each[t] = x + t * h;
  by_rows(n, threads, ROWS, [&](int64_t first, int64_t last, int64_t following) {
    for (int64_t row = first; row < last; row += ROWS) {
      const char* const ahead = bytes_at(weights + (row + ROWS < last ? row + ROWS : following) * h);
      const T* four[ROWS];
      for (int r = 0; r < ROWS; r++) four[r] = weights + std::min(row + r, n - 1) * h;
      by_tokens<TOKENS>(tokens, [&](int64_t t, auto count) {
        float y[count() * ROWS];
        if (t == 0) dot_rows<How, count(), ROWS, lines>(four, ahead, each.data() + t, h, y, ROWS);
        else dot_rows<How, count(), ROWS, 0>(four, ahead, each.data() + t, h, y, ROWS);
        for (int k = 0; k < count(); k++)
          for (int r = 0; r < ROWS && row + r < last; r++)
            write(y[k * ROWS + r] + (bias ? bias[row + r] : 0.0f), out, out_dtype, (t + k) * n + row + r);
      });
    }
  });
}

#if defined(HRM_BF16_DOT)
// Many tokens side by side in the lanes, 4 * FOURS rows at a time: no sums over lanes, and each pair of a row's weights
// is loaded once for V vectors of tokens. packed: pairs of columns of all tokens in turn [h / 2][V * W].
template <int V, int FOURS>
[[gnu::flatten]] inline void side_by_side(const bf16* rows, int64_t h, const bf16* ahead, const int32_t* packed,
                                          float* found) {
  vf sums[FOURS * 4 * V];
  unroll<FOURS * 4 * V>([&](auto i) { sums[i] = vf{}; });
  const int64_t stride = h * sizeof(bf16);
  const char *const base = bytes_at(rows), *const next = bytes_at(ahead);
  for (int64_t c = 0; c < stride; c += LINE) {  // one line of each row
    unroll<FOURS * 4>([&](auto r) { prefetch(next + c + r * stride); });
    for (int64_t p = c; p < c + LINE; p += sizeof(int32_t), packed += V * W) {
      vf x[V];
      unroll<V>([&](auto v) { x[v] = (vf)_mm512_loadu_si512(packed + v * W); });
      unroll<FOURS>([&](auto four) {
        const char* const at = base + four * 4 * stride + p;
        unroll<4>([&](auto r) {
          int32_t pair;
          std::memcpy(&pair, at + r * stride, sizeof pair);
          const vf factor = (vf)_mm512_set1_epi32(pair);
          unroll<V>([&](auto v) {
            constexpr int i = (four * 4 + r) * V + v;
            sums[i] = Pairs::add(sums[i], x[v], factor);
          });
        });
      });
    }
  }
  unroll<FOURS * 4 * V>([&](auto i) { store(found + i * W, sums[i]); });
}

// The same product for V vectors of tokens, h a multiple of 32.
template <int V>
void multiply_side_by_side(const bf16* x, const bf16* weights, const float* bias, void* out, int out_dtype,
                           int64_t tokens, int64_t n, int64_t h, int threads) {
  constexpr int FOURS = V <= 2 ? 3 : 2, MOST = 4 * FOURS;
  Buffer<int32_t> packed(h / 2 * V * W);
  std::memset(packed.data, 0, h / 2 * V * W * sizeof(int32_t));
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t c = 0; c < h / 2; c++) std::memcpy(packed.data + c * V * W + t, x + t * h + 2 * c, sizeof(int32_t));
  by_rows(n, threads, MOST, [&](int64_t first, int64_t last, int64_t following) {
    alignas(64) float found[MOST * V * W];
    for (int64_t row = first; row < last;) {
      const int64_t left = last - row, count = left >= MOST ? MOST : 4;
      const int64_t base = left >= 4 ? row : std::max<int64_t>(0, last - 4);  // the last rows again, with some before
      const bf16* const ahead = weights + (row + count < last ? row + count : following) * h;
      if (count == MOST) side_by_side<V, FOURS>(weights + base * h, h, ahead, packed.data, found);
      else side_by_side<V, 1>(weights + base * h, h, ahead, packed.data, found);
      for (int64_t t = 0; t < tokens; t++)
        for (int64_t r = row - base; r < std::min(count, last - base); r++)
          write(found[r * V * W + t] + (bias ? bias[base + r] : 0.0f), out, out_dtype, t * n + base + r);
      row = std::min(last, base + count);
    }
  });
}
#endif

}  // namespace

extern "C" {

// out [tokens, h] += the experts' answers. Segments: rows [n][3][h] of an expert each; visits of segment s are
// order[starts[s]] .. order[ends[s] - 1], with their routing weights. Segments without visits are not read.
void hrm_apply_experts(const void* x, int x_dtype, const void* const* rows, const int64_t* counts,
                       const int64_t* starts, const int64_t* ends, int64_t segments, int dtype, const int64_t* order,
                       const float* weights, float* out, int64_t tokens, int64_t h, int threads) {
  std::vector<Segment> visited;
  for (int64_t s = 0; s < segments; s++)
    if (ends[s] > starts[s] && counts[s] > 0)
      visited.push_back({rows[s], counts[s], order + starts[s], weights + starts[s], ends[s] - starts[s]});
  if (visited.empty()) return;
#if defined(HRM_BF16_DOT)
  if (dtype == BF16 && x_dtype == BF16 && h % Pairs::step == 0)
    return apply<Pairs, bf16>(visited, static_cast<const bf16*>(x), out, tokens, h, threads);
#endif
  Buffer<float> kept(x_dtype == FP32 ? 0 : tokens * h);
  const float* const wide = widened(x, x_dtype, tokens * h, kept);
  if (dtype == FP32) apply<Widened, float>(visited, wide, out, tokens, h, threads);
  else if (dtype == BF16) apply<Widened, bf16>(visited, wide, out, tokens, h, threads);
  else apply<Widened, fp16>(visited, wide, out, tokens, h, threads);
}

// out [tokens, n] = x [tokens, h] times weights [n, h] transposed, plus bias [n] (may be null), all float32 inside.
void hrm_multiply(const void* x, int x_dtype, const void* weights, int dtype, const float* bias, void* out,
                  int out_dtype, int64_t tokens, int64_t n, int64_t h, int threads) {
#if defined(HRM_BF16_DOT)
  if (dtype == BF16 && x_dtype == BF16 && tokens > SIDE_BY_SIDE && tokens <= 3 * W && n >= 64 && h % Pairs::step == 0) {
    const auto call = tokens <= W       ? multiply_side_by_side<1>
                      : tokens <= 2 * W ? multiply_side_by_side<2>
                                        : multiply_side_by_side<3>;
    return call(static_cast<const bf16*>(x), static_cast<const bf16*>(weights), bias, out, out_dtype, tokens, n, h,
                threads);
  }
  if (dtype == BF16 && x_dtype == BF16)
    return multiply<Pairs>(static_cast<const bf16*>(x), static_cast<const bf16*>(weights), bias, out, out_dtype,
                              tokens, n, h, threads);
#endif
  Buffer<float> kept(x_dtype == FP32 ? 0 : tokens * h);
  const float* const wide = widened(x, x_dtype, tokens * h, kept);
  if (dtype == FP32)
    multiply<Widened>(wide, static_cast<const float*>(weights), bias, out, out_dtype, tokens, n, h, threads);
  else if (dtype == BF16)
    multiply<Widened>(wide, static_cast<const bf16*>(weights), bias, out, out_dtype, tokens, n, h, threads);
  else
    multiply<Widened>(wide, static_cast<const fp16*>(weights), bias, out, out_dtype, tokens, n, h, threads);
}
}
