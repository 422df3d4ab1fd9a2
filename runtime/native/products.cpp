// Few tokens times many weights: the experts of a layer, and a linear layer. Every weight is read once, from where it
// lies and in the order in which it lies, and multiplied with all tokens that want it while it is in the cache.
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "vector.h"

using namespace hrm;

namespace {

constexpr int ROWS = 4;  // rows of weights at a time
#if defined(HRM_AVX512)
constexpr int TOKENS = 6;  // tokens at a time: ROWS x TOKENS sums stay in registers
constexpr int ADDED = 8;   // tokens at a time where two vectors of each are added to
#else
constexpr int TOKENS = 2;
constexpr int ADDED = 4;
#endif
constexpr int PANEL = 2 * W;          // columns of sums at a time
constexpr int BLOCK = 16;             // rows of an expert between the two halves of its work, at most
constexpr int64_t LINE = 64;          // bytes of a cache line
constexpr int64_t PART = 4096;        // bytes of a row at a time, so that four rows stay in the first cache
constexpr int64_t LEAD = 96 * 1024;   // bytes that memory is asked for ahead: less and the second half of a block waits
constexpr int64_t LARGEST = 1 << 18;  // bytes of a block: it shares the second cache with the next, tokens and sums
static_assert(BLOCK % W == 0 && BLOCK % ROWS == 0);

// Memory that will be read next, asked for in the order in which it lies while other work is done, a little at a time:
// so memory is never idle, and rows that are used in another order are there already. What is asked for faster than
// memory delivers is lost, hence the pace.
struct Ahead {
  const char* at;
  const char* end;
  const char* then = nullptr;  // goes on here after `end`
  const char* then_end = nullptr;
  const char* limit = nullptr;
  int lines = 0;  // per step
  // Spreads the next `bytes` over so many steps.
  void spread(int64_t bytes, int64_t steps) {
    if (at >= end && then) at = then, end = then_end, then = nullptr;
    limit = end - at < bytes ? end : at + bytes;
    lines = static_cast<int>(bytes / (LINE * steps) + 1);
  }
};

// One step: where to go on. The caller keeps that in a register: through memory it costs more than the products do.
[[gnu::always_inline]] inline const char* ask(const char* at, const char* limit, int lines) {
  for (int line = 0; line < lines && at < limit; line++, at += LINE) prefetch(at);
  return at;
}

// out[token * stride + 0..3] = (or, unless from is 0, +=) the products of columns `from` to `to` of four rows with N
// tokens.
template <class How, int N, class T, class X>
[[gnu::flatten]] inline void dot_rows(const T* const* rows, Ahead& ahead, const X* const* x, int64_t from,
                                      int64_t to, float* out, int64_t stride) {
  vf sums[N * ROWS];
  unroll<N * ROWS>([&](auto i) { sums[i] = vf{}; });
  const char* at = ahead.at;
  const char* const limit = ahead.limit;
  const int lines = ahead.lines;
  int64_t c = from;
  for (; c + How::step <= to; c += How::step) {
    vf y[ROWS];
    unroll<ROWS>([&](auto r) { y[r] = How::get(rows[r] + c); });
    at = ask(at, limit, lines);
    unroll<N>([&](auto t) {
      const vf z = How::get(x[t] + c);
      unroll<ROWS>([&](auto r) { sums[t * ROWS + r] = How::add(sums[t * ROWS + r], y[r], z); });
    });
  }
  ahead.at = at;
  unroll<N>([&](auto t) {
    float four[ROWS];
    sum4(sums[t * ROWS], sums[t * ROWS + 1], sums[t * ROWS + 2], sums[t * ROWS + 3], four);
    for (int r = 0; r < ROWS; r++) out[t * stride + r] = from ? out[t * stride + r] + four[r] : four[r];
  });
  for (; c < to; c++)
    for (int t = 0; t < N; t++)
      for (int r = 0; r < ROWS; r++) out[t * stride + r] += widen(rows[r][c]) * widen(x[t][c]);
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
template <int N, class T>
[[gnu::flatten]] inline void add_columns(const T* rows, int64_t stride, int count, const float* factors,
                                         const int64_t* places, float* panel, Ahead& ahead) {
  const char* at = ahead.at;
  const char* const limit = ahead.limit;
  const int lines = ahead.lines;
  vf sums[N * 2];
  unroll<N>([&](auto t) { unroll<2>([&](auto i) { sums[t * 2 + i] = load(panel + places[t] + i * W); }); });
  for (int r = 0; r < count; r++) {
    const vf a = load(rows + r * stride), b = load(rows + r * stride + W);
    at = ask(at, limit, lines);
    unroll<N>([&](auto t) {
      const vf factor = splat(factors[t * BLOCK + r]);
      sums[t * 2] += factor * a;
      sums[t * 2 + 1] += factor * b;
    });
  }
  ahead.at = at;
  unroll<N>([&](auto t) { unroll<2>([&](auto i) { store(panel + places[t] + i * W, sums[t * 2 + i]); }); });
}

#if defined(HRM_BF16_DOT)
// The same with factors in bf16, two rows per instruction; of 32 columns the first vector gets 0-3, 8-11, ..., the
// second 4-7, 12-15, ... (add_in_order puts that right).
template <int N>
[[gnu::flatten]] inline void add_pairs(const bf16* rows, int64_t stride, int count, const bf16* factors,
                                       const int64_t* places, float* panel, Ahead& ahead) {
  const char* at = ahead.at;
  const char* const limit = ahead.limit;
  const int lines = ahead.lines;
  vf sums[N * 2];
  unroll<N>([&](auto t) { unroll<2>([&](auto i) { sums[t * 2 + i] = load(panel + places[t] + i * W); }); });
  for (int r = 0; r < count; r += 2) {
    const __m512i a = _mm512_loadu_si512(rows + r * stride);
    const __m512i b = _mm512_loadu_si512(rows + (r + 1 < count ? r + 1 : r) * stride);  // factor 0 past the end
    at = ask(at, limit, lines);
    const vf low = (vf)_mm512_unpacklo_epi16(a, b), high = (vf)_mm512_unpackhi_epi16(a, b);
    unroll<N>([&](auto t) {
      int32_t pair;
      std::memcpy(&pair, factors + t * BLOCK + r, sizeof pair);
      const vf factor = (vf)_mm512_set1_epi32(pair);
      sums[t * 2] = Pairs::add(sums[t * 2], low, factor);
      sums[t * 2 + 1] = Pairs::add(sums[t * 2 + 1], high, factor);
    });
  }
  ahead.at = at;
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

// One block of an expert: gate and up products of its rows, then its down rows added to the sums of the tokens.
template <class How, class T, class X>
void apply_block(const T* rows, int count, int64_t h, const Segment& segment, Visits<X>& visits, float* sums,
                 int64_t tokens, Ahead& ahead) {
  const int64_t bytes = count * h * static_cast<int64_t>(sizeof(T)), passes = (segment.visits + TOKENS - 1) / TOKENS;
  ahead.spread(2 * bytes, passes * ((count + 1) / 2) * ((h + How::step - 1) / How::step));
  // Columns in parts, so that those of a pair of rows stay in the first cache for all tokens.
  constexpr int64_t columns = PART / sizeof(T);
  for (int i = 0; i < count; i += 2)
    for (int64_t from = 0; from < h; from += columns) {
      const int64_t to = std::min(h, from + columns);
      by_tokens<TOKENS>(segment.visits, [&](int64_t t, auto n) {
        const int j = i + 1 < count ? i + 1 : i;  // of an odd number the last stands in for one that is not there
        const T *const a = rows + i * 3 * h, *const b = rows + j * 3 * h;
        const T* const four[ROWS] = {a, a + h, b, b + h};
        dot_rows<How, n()>(four, ahead, visits.x.data() + t, from, to, visits.dots.data + (t * BLOCK + i) * 2,
                           2 * BLOCK);
      });
    }
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
  ahead.spread(bytes, (segment.visits + ADDED - 1) / ADDED * ((h + PANEL - 1) / PANEL) *
                          (How::step == PANEL ? (count + 1) / 2 : count));
  int64_t c = 0;
  for (; c + PANEL <= h; c += PANEL) {
    by_tokens<ADDED>(segment.visits, [&](int64_t t, auto n) {
#if defined(HRM_BF16_DOT)
      if constexpr (How::step == PANEL)
        add_pairs<n()>(down + c, 3 * h, count, visits.pairs.data + t * BLOCK, visits.places.data() + t,
                       sums + c * tokens, ahead);
      else
#endif
        add_columns<n()>(down + c, 3 * h, count, visits.factors.data + t * BLOCK, visits.places.data() + t,
                         sums + c * tokens, ahead);
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
          return static_cast<const T*>(of.segment->rows) + (of.first + std::min(r, of.count)) * 3 * h;
        };
        const int64_t lead = 1 + LEAD / record;
        Ahead ahead{bytes_at(row(unit, lead)), bytes_at(row(unit, unit.count))};
        if (next) ahead.then = bytes_at(row(*next, 0)), ahead.then_end = bytes_at(row(*next, lead));
        for (int64_t r = 0; r < unit.count; r += step)
          apply_block<How>(row(unit, r), static_cast<int>(std::min(step, unit.count - r)), h, segment, visits, sums,
                           tokens, ahead);
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

// Four rows at a time of weights [n, h], for all tokens.
template <class How, class T, class X>
void multiply(const X* x, const T* weights, const float* bias, void* out, int out_dtype, int64_t tokens, int64_t n,
              int64_t h, int threads) {
  std::atomic<int64_t> counter{0};
  const int64_t size = std::min<int64_t>(64, round_up(n / (16 * threads) + 1, BLOCK)), units = (n + size - 1) / size;
#pragma omp parallel num_threads(threads)
  {
    std::vector<const X*> each(tokens);
    for (int64_t t = 0; t < tokens; t++) each[t] = x + t * h;
    int64_t i = counter.fetch_add(1);
    while (i < units) {
      const int64_t following = counter.fetch_add(1);
      const int64_t end = std::min(n, (i + 1) * size);
      for (int64_t first = i * size; first < end; first += BLOCK) {
        const int64_t last = std::min(end, first + BLOCK);
        const int64_t next = last < end ? last : following < units ? following * size : n;
        Ahead ahead{bytes_at(weights + next * h), bytes_at(weights + std::min(n, next + BLOCK) * h)};
        const int64_t passes = (tokens + TOKENS - 1) / TOKENS, groups = (last - first + ROWS - 1) / ROWS;
        ahead.spread(ahead.end - ahead.at, passes * groups * ((h + How::step - 1) / How::step));
        for (int64_t row = first; row < last; row += ROWS) {
          const T* four[ROWS];
          for (int r = 0; r < ROWS; r++) four[r] = weights + std::min(row + r, n - 1) * h;
          by_tokens<TOKENS>(tokens, [&](int64_t t, auto count) {
            float y[count() * ROWS];
            dot_rows<How, count()>(four, ahead, each.data() + t, 0, h, y, ROWS);
            for (int k = 0; k < count(); k++)
              for (int r = 0; r < ROWS && row + r < last; r++)
                write(y[k * ROWS + r] + (bias ? bias[row + r] : 0.0f), out, out_dtype, (t + k) * n + row + r);
          });
        }
      }
      i = following;
    }
  }
}

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
