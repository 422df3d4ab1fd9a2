// Attention of one new token per request over keys and values that stay where they are: every byte of them is read
// once, for all query heads that share it, with an online softmax over tiles of tokens (Milakov and Gimelshein,
// arXiv 1805.02867). Long requests are cut into pieces that threads take in turn; the pieces are merged at the end.
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "vector.h"

using namespace hrm;

namespace {

constexpr int TILE = 32;           // tokens between two updates of the softmax
constexpr float SLACK = 8;         // growth of the largest score, in powers of two, that is let pass
constexpr int VALUES = 8;          // tokens whose values are added at a time
constexpr int HEADS = 4;           // query heads at a time: HEADS x 4 sums stay in registers
constexpr int64_t AHEAD = 1 << 14;  // bytes of keys, and of values, that are asked for ahead
#if defined(HRM_AVX512)
constexpr int COLUMNS = 4;  // vectors of an output row at a time: HEADS x COLUMNS sums
constexpr int KEYS = 4;     // keys at a time: HEADS x KEYS sums
#else
constexpr int COLUMNS = 2;
constexpr int KEYS = 2;
#endif

struct Problem {
  const void* q;
  int q_dtype;
  const void* keys;
  const void* values;
  int64_t key_stride, value_stride;  // elements from a token to the next
  const int64_t* first;
  const int64_t* lengths;
  void* out;
  int out_dtype;
  int64_t requests;
  int heads, groups, d;
  float scale;
  int64_t padded() const { return round_up(d, W); }
  int64_t state() const { return heads * (2 + padded()); }  // largest score, sum of weights, weighted values
};

// Some tokens of a request; piece is the number of its state among those to be merged, or -1 where it is all of it.
struct Item {
  int64_t request, row, tokens, piece;
};

template <class T>
void widen_row(const void* from, int64_t at, int n, float* to) {
  for (int i = 0; i < n; i++) to[i] = widen(static_cast<const T*>(from)[at + i]);
}

void read_row(const void* from, int dtype, int64_t at, int n, float* to) {
  if (dtype == FP32) widen_row<float>(from, at, n, to);
  else if (dtype == BF16) widen_row<bf16>(from, at, n, to);
  else widen_row<fp16>(from, at, n, to);
}

template <class T>
void narrow_row(const float* from, float factor, int n, void* to, int64_t at) {
  for (int i = 0; i < n; i++) narrow(from[i] * factor, static_cast<T*>(to) + at + i);
}

void write_row(const float* from, float factor, int n, void* to, int dtype, int64_t at) {
  if (dtype == FP32) narrow_row<float>(from, factor, n, to, at);
  else if (dtype == BF16) narrow_row<bf16>(from, factor, n, to, at);
  else narrow_row<fp16>(from, factor, n, to, at);
}

// scores[n][0..KEYS-1] = q_n . k_0, q_n . k_1, ...; of fewer rows, the last stands in for those that are missing.
template <class How, int N, class Q, class K>
[[gnu::flatten]] inline void dot_rows(const Q* q, int64_t q_stride, const K* rows, int64_t stride, int count,
                                      int64_t d, float* scores) {
  const K* k[KEYS];
  unroll<KEYS>([&](auto t) { k[t] = rows + stride * (t < count ? int{t} : count - 1); });
  vf sums[round_up(N * KEYS, 4)];
  unroll<round_up(N * KEYS, 4)>([&](auto i) { sums[i] = vf{}; });
  for (int64_t c = 0; c < d; c += How::step) {
    vf x[KEYS];
    unroll<KEYS>([&](auto t) { x[t] = How::get(k[t] + c); });
    unroll<N>([&](auto n) {
      const vf y = How::get(q + n * q_stride + c);
      unroll<KEYS>([&](auto t) { sums[n * KEYS + t] = How::add(sums[n * KEYS + t], x[t], y); });
    });
  }
  unroll<(N * KEYS + 3) / 4>([&](auto i) {
    float four[4];
    sum4(sums[i * 4], sums[i * 4 + 1], sums[i * 4 + 2], sums[i * 4 + 3], four);
    unroll<4 / KEYS>([&](auto j) {
      constexpr int n = i * 4 / KEYS + j;
      if constexpr (n < N) std::memcpy(scores + n * TILE, four + j * KEYS, KEYS * sizeof(float));
    });
  });
}

// Weighted values of some tokens added to C vectors of columns of N output rows.
template <int N, int C, class V>
[[gnu::flatten]] inline void add_values(const V* v, int64_t stride, int tokens, const float* weights, float* out,
                                        int64_t out_stride) {
  vf sums[N * C];
  unroll<N>([&](auto n) { unroll<C>([&](auto c) { sums[n * C + c] = load(out + n * out_stride + c * W); }); });
  for (int t = 0; t < tokens; t++) {
    vf x[C];
    unroll<C>([&](auto c) { x[c] = load(v + t * stride + c * W); });
    unroll<N>([&](auto n) {
      const vf weight = splat(weights[n * TILE + t]);
      unroll<C>([&](auto c) { sums[n * C + c] += weight * x[c]; });
    });
  }
  unroll<N>([&](auto n) { unroll<C>([&](auto c) { store(out + n * out_stride + c * W, sums[n * C + c]); }); });
}

template <int N, class V>
inline void add_rows(const V* v, int64_t stride, int tokens, const float* weights, float* out, int64_t width) {
  int64_t c = 0;
  for (; c + COLUMNS * W <= width; c += COLUMNS * W)
    add_values<N, COLUMNS>(v + c, stride, tokens, weights, out + c, width);
  for (; c < width; c += W) add_values<N, 1>(v + c, stride, tokens, weights, out + c, width);
}

// Scores [N][TILE] of a tile, of which `tokens` count, become weights 2^(score - base); bases [N], totals [N][W],
// out [N][width]. The base follows the largest score only when that has grown by more than SLACK: float32 has room for
// such weights, and what is summed up already needs scaling down only in the first tiles.
template <int N>
[[gnu::flatten]] inline void weigh(float* scores, int tokens, float scale, float* bases, float* totals, float* out,
                                   int64_t width) {
  constexpr int PARTS = TILE / W;
  if (tokens < TILE)
    for (int n = 0; n < N; n++)
      for (int t = tokens; t < TILE; t++) scores[n * TILE + t] = -INFINITY;
  vf x[N * PARTS], most[N];
  const vf factor = splat(scale);
  unroll<N * PARTS>([&](auto i) { x[i] = load(scores + i * W) * factor; });
  unroll<N>([&](auto n) {
    most[n] = x[n * PARTS];
    unroll<PARTS>([&](auto c) { most[n] = max(most[n], x[n * PARTS + c]); });
  });
  unroll<N>([&](auto n) {
    const float now = largest(most[n]), before = bases[n];
    if (now > before + SLACK) {
      bases[n] = now;
      const vf shrink = exp2(splat(before - now));
      store(totals + n * W, load(totals + n * W) * shrink);
      for (int64_t c = 0; c < width; c += W) store(out + n * width + c, load(out + n * width + c) * shrink);
    }
  });
  unroll<N>([&](auto n) {
    const vf base = splat(bases[n]);
    vf total = load(totals + n * W);
    unroll<PARTS>([&](auto c) {
      const vf weights = exp2(x[n * PARTS + c] - base);
      store(scores + n * TILE + c * W, weights);
      total += weights;
    });
    store(totals + n * W, total);
  });
}

// f with the number of heads h, h + 1, ... (at most HEADS, before `heads`) as a constant, for every such group.
template <class F>
inline void by_heads(int heads, F&& f) {
  for (int h = 0; h < heads; h += HEADS) {
    const int n = heads - h < HEADS ? heads - h : HEADS;
    if (n == 4) f(h, std::integral_constant<int, 4>{});
    else if (n == 3) f(h, std::integral_constant<int, 3>{});
    else if (n == 2) f(h, std::integral_constant<int, 2>{});
    else f(h, std::integral_constant<int, 1>{});
  }
}

// Asks for rows of a pool some way ahead of where an item is read: its own, or past its end the next item's.
template <class T>
struct Ahead {
  const T* pool;
  int64_t stride;
  const Item& item;
  const Item* next;
  int64_t distance;  // tokens
  Ahead(const T* pool_, int64_t stride_, const Item& item_, const Item* next_)
      : pool(pool_), stride(stride_), item(item_), next(next_),
        distance(1 + AHEAD / (stride_ * static_cast<int64_t>(sizeof(T)))) {}
  // Part i of n of the rows that lie `distance` after tokens t .. t + count.
  void ask(int64_t t, int count, int i, int n) const {
    int64_t row = t + distance;
    const Item* of = &item;
    if (row >= item.tokens) {
      if (!next) return;
      row -= item.tokens, of = next;
      if (row >= next->tokens) return;
    }
    const int64_t bytes = count * stride * static_cast<int64_t>(sizeof(T));
    const char* const p = reinterpret_cast<const char*>(pool + (of->row + row) * stride);
    for (int64_t b = bytes * i / n & -64, end = bytes * (i + 1) / n; b < end; b += 64) prefetch(p + b);
  }
};

// What one thread needs, made once per call.
struct Scratch {
  Buffer<float> q, out, totals, scores, padded;
  explicit Scratch(const Problem& p)
      : q(p.heads * p.padded()), out(p.state()), totals(p.heads * W), scores(p.heads * TILE),
        padded(VALUES * p.padded()) {}
};

// Some rows of one head, a copy with zeros behind each up to whole vectors.
template <class T>
const float* pad(const T* rows, int64_t stride, int count, int d, int64_t width, float* to) {
  for (int i = 0; i < count; i++)
    for (int64_t c = 0; c < width; c++) to[i * width + c] = c < d ? widen(rows[i * stride + c]) : 0.0f;
  return to;
}

// State of an item: [heads] base, [heads] sum of weights, [heads][width] weighted values, not yet divided.
// Rows of the pools are read in the order in which they lie in memory, a few tokens of all heads at a time.
template <class How, class T>
void attend_item(const Problem& p, const Item& item, const Item* next, Scratch& scratch, float* state) {
  const int64_t width = p.padded();
  const int shared = p.heads / p.groups;
  float* const bases = state;
  float* const out = state + 2 * p.heads;
  float* const totals = scratch.totals.data;
  float* const scores = scratch.scores.data;
  for (int h = 0; h < p.heads; h++) bases[h] = -INFINITY;
  std::memset(out, 0, sizeof(float) * p.heads * width);
  std::memset(totals, 0, sizeof(float) * p.heads * W);
  constexpr bool is_widened = How::step == W;
  std::conditional_t<is_widened, const float, const bf16>* q;
  if constexpr (is_widened) {
    q = scratch.q.data;
    std::memset(scratch.q.data, 0, sizeof(float) * p.heads * width);
    for (int h = 0; h < p.heads; h++)
      read_row(p.q, p.q_dtype, (item.request * p.heads + h) * p.d, p.d, scratch.q.data + h * width);
  } else {
    q = static_cast<const bf16*>(p.q) + item.request * p.heads * p.d;
  }
  const T* const keys = static_cast<const T*>(p.keys) + item.row * p.key_stride;
  const T* const values = static_cast<const T*>(p.values) + item.row * p.value_stride;
  const Ahead<T> keys_ahead(static_cast<const T*>(p.keys), p.key_stride, item, next);
  const Ahead<T> values_ahead(static_cast<const T*>(p.values), p.value_stride, item, next);
  for (int64_t first = 0; first < item.tokens; first += TILE) {
    const int tokens = static_cast<int>(item.tokens - first < TILE ? item.tokens - first : TILE);
    for (int t = 0; t < tokens; t += 4) {
      const int count = tokens - t < 4 ? tokens - t : 4;
      for (int g = 0; g < p.groups; g++) {
        keys_ahead.ask(first + t, 4, g, p.groups);
        const T* const k = keys + (first + t) * p.key_stride + g * p.d;
        const auto dot = [&](auto how, const auto* rows, int64_t stride) {
          by_heads(shared, [&](int h, auto n) {
            for (int i = 0; i < count; i += KEYS)
              dot_rows<decltype(how), n()>(q + (g * shared + h) * width, width, rows + i * stride, stride,
                                           count - i < KEYS ? count - i : KEYS, width,
                                           scores + (g * shared + h) * TILE + t + i);
          });
        };
        if (is_widened && p.d % W) {
          if constexpr (is_widened) dot(Widened{}, pad(k, p.key_stride, count, p.d, width, scratch.padded.data), width);
        } else {
          dot(How{}, k, p.key_stride);
        }
      }
    }
    by_heads(p.heads, [&](int h, auto n) {
      weigh<n()>(scores + h * TILE, tokens, p.scale, bases + h, totals + h * W, out + h * width, width);
    });
    for (int t = 0; t < tokens; t += VALUES) {
      const int count = tokens - t < VALUES ? tokens - t : VALUES;
      for (int g = 0; g < p.groups; g++) {
        values_ahead.ask(first + t, VALUES, g, p.groups);
        const T* const v = values + (first + t) * p.value_stride + g * p.d;
        const auto add = [&](const auto* rows, int64_t stride) {
          by_heads(shared, [&](int h, auto n) {
            const int head = g * shared + h;
            add_rows<n()>(rows, stride, count, scores + head * TILE + t, out + head * width, width);
          });
        };
        if (p.d % W) add(pad(v, p.value_stride, count, p.d, width, scratch.padded.data), width);
        else add(v, p.value_stride);
      }
    }
  }
  for (int h = 0; h < p.heads; h++) state[p.heads + h] = sum(load(totals + h * W));
}

void finish(const Problem& p, int64_t request, const float* state) {
  for (int h = 0; h < p.heads; h++) {
    const float total = state[p.heads + h];
    write_row(state + 2 * p.heads + h * p.padded(), total == 0.0f ? 0.0f : 1.0f / total, p.d, p.out, p.out_dtype,
              (request * p.heads + h) * p.d);
  }
}

// One state out of the pieces of a request, in place of the first.
void merge(const Problem& p, float* states, int64_t pieces) {
  const int64_t width = p.padded();
  for (int64_t i = 1; i < pieces; i++) {
    const float* const other = states + i * p.state();
    for (int h = 0; h < p.heads; h++) {
      const float now = std::fmax(states[h], other[h]);
      const float mine = std::exp2(states[h] - now), theirs = std::exp2(other[h] - now);
      states[h] = now;
      states[p.heads + h] = states[p.heads + h] * mine + other[p.heads + h] * theirs;
      float* const a = states + 2 * p.heads + h * width;
      const float* const b = other + 2 * p.heads + h * width;
      for (int64_t c = 0; c < width; c++) a[c] = a[c] * mine + b[c] * theirs;
    }
  }
}

template <class How, class T>
void attend(const Problem& p, int threads) {
  int64_t total = 0;
  for (int64_t b = 0; b < p.requests; b++) total += p.lengths[b];
  // Pieces small enough that threads end at about the same time, large enough that their states cost little.
  const int64_t wanted = round_up(total / (8 * threads) + 1, TILE);
  const int64_t most = std::min<int64_t>(512, std::max<int64_t>(64, wanted));
  std::vector<Item> items;
  std::vector<int64_t> first_piece(p.requests, -1), pieces(p.requests, 1);
  int64_t states = 0;
  for (int64_t b = 0; b < p.requests; b++) {
    pieces[b] = threads == 1 ? 1 : std::max<int64_t>(1, (p.lengths[b] + most - 1) / most);
    const int64_t size = round_up((p.lengths[b] + pieces[b] - 1) / pieces[b], TILE);
    if (size) pieces[b] = (p.lengths[b] + size - 1) / size;
    if (pieces[b] > 1) first_piece[b] = states, states += pieces[b];
    for (int64_t i = 0; i < pieces[b]; i++)
      items.push_back({b, p.first[b] + i * size, std::min(size, p.lengths[b] - i * size),
                       pieces[b] > 1 ? first_piece[b] + i : -1});
  }
  Buffer<float> kept(states * p.state());
  std::atomic<int64_t> counter{0};
  const int64_t n = static_cast<int64_t>(items.size());
#pragma omp parallel num_threads(threads)
  {
    Scratch scratch(p);
    int64_t i = counter.fetch_add(1);
    while (i < n) {
      const int64_t next = counter.fetch_add(1);  // taken now, so that its first tile can be asked for in time
      float* const state = items[i].piece < 0 ? scratch.out.data : kept.data + items[i].piece * p.state();
      attend_item<How, T>(p, items[i], next < n ? &items[next] : nullptr, scratch, state);
      if (items[i].piece < 0) finish(p, items[i].request, state);
      i = next;
    }
    if (states) {
#pragma omp barrier
#pragma omp for schedule(dynamic)
      for (int64_t b = 0; b < p.requests; b++) {
        if (pieces[b] < 2) continue;
        merge(p, kept.data + first_piece[b] * p.state(), pieces[b]);
        finish(p, b, kept.data + first_piece[b] * p.state());
      }
    }
  }
}

}  // namespace

// Returns -1; or, having done nothing, the number of a request whose tokens do not lie within the `rows` rows of the
// pools. No window: 0.
extern "C" int64_t hrm_attend_decode(const void* q, int q_dtype, const void* keys, const void* values, int kv_dtype,
                                     int64_t rows, int64_t key_stride, int64_t value_stride, const int64_t* first,
                                     const int64_t* lengths, void* out, int out_dtype, int64_t requests, int heads,
                                     int groups, int d, float scale, int64_t window, int threads) {
  std::vector<int64_t> starts(first, first + requests), counts(lengths, lengths + requests);
  for (int64_t b = 0; b < requests; b++) {
    if (counts[b] < 1 || starts[b] < 0 || starts[b] > rows - counts[b]) return b;
    if (window > 0 && counts[b] > window) starts[b] += counts[b] - window, counts[b] = window;
  }
  const Problem p{q,      q_dtype, keys,   values,    key_stride, value_stride, starts.data(), counts.data(),
                  out, out_dtype, requests, heads, groups, d, scale * 1.44269504088896341f};  // scores in powers of two
#if defined(HRM_BF16_DOT)
  if (kv_dtype == BF16 && q_dtype == BF16 && d % Pairs::step == 0) {
    attend<Pairs, bf16>(p, threads);
    return -1;
  }
#endif
  if (kv_dtype == FP32) attend<Widened, float>(p, threads);
  else if (kv_dtype == FP16) attend<Widened, fp16>(p, threads);
  else attend<Widened, bf16>(p, threads);
  return -1;
}
