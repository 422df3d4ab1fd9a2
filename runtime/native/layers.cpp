// What a layer does besides its products: norms, rotary positions, routing, the likeliest token, rows into the KV
// cache. Each reads and writes every byte once; torch makes a pass, and often new memory, of each of their steps.
// Sums and factors are float32, rounded to the dtype of the tensors where the released models' own code rounds.
// No product and sum is fused here: torch does not, and a rotation in float32 is to give the same bits.
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

#include <omp.h>

#include <cmath>
#include <vector>

#include "vector.h"

using namespace hrm;

namespace {

constexpr int64_t SMALL = 1 << 16;  // values up to which one thread is as fast as several that must be woken

// f(first, last) for all of n items that are `values` values altogether, by one thread or several.
template <class F>
void share(int64_t n, int64_t values, int threads, F&& f) {
  if (threads < 2 || n < 2 || values <= SMALL) {
    f(int64_t{0}, n);
    return;
  }
#pragma omp parallel num_threads(threads)
  {
    const int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
    f(n * me / team, n * (me + 1) / team);
  }
}

// f with a null pointer of the type that a number stands for.
template <class F>
void by_dtype(int dtype, F&& f) {
  if (dtype == FP32) f(static_cast<float*>(nullptr));
  else if (dtype == BF16) f(static_cast<bf16*>(nullptr));
  else f(static_cast<fp16*>(nullptr));
}
template <class P>
using Pointed = std::remove_pointer_t<P>;

// The sum of f(vector of x) over a row; what is behind its end counts as zero and is not given to f.
template <class T, class F, class G>
inline float sum_of(const T* x, int64_t n, F&& f, G&& f_one) {
  vf a{}, b{}, c{}, d{};
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W) {
    a += f(load(x + i)), b += f(load(x + i + W));
    c += f(load(x + i + 2 * W)), d += f(load(x + i + 3 * W));
  }
  for (; i + W <= n; i += W) a += f(load(x + i));
  float rest = 0;
  for (; i < n; i++) rest += f_one(widen(x[i]));
  return sum((a + b) + (c + d)) + rest;
}

template <class T, class U>
void rms_row(const T* x, const U* weight, T* out, int64_t n, float eps) {
  const float mean = sum_of(x, n, [](vf y) { return y * y; }, [](float y) { return y * y; }) / static_cast<float>(n);
  const float factor = 1.0f / std::sqrt(mean + eps);
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, load(weight + i) * rounded<T>(load(x + i) * splat(factor)));
  for (; i < n; i++) narrow(widen(weight[i]) * rounded_one<T>(widen(x[i]) * factor), out + i);
}

template <class T, class U>
void layer_row(const T* x, const U* weight, T* out, int64_t n, float eps) {
  const auto count = static_cast<float>(n);
  const float mean = sum_of(x, n, [](vf y) { return y; }, [](float y) { return y; }) / count;
  const vf means = splat(mean);
  const float variance = sum_of(x, n, [=](vf y) { return (y - means) * (y - means); },
                                [=](float y) { return (y - mean) * (y - mean); }) / count;
  const float factor = 1.0f / std::sqrt(variance + eps);
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, (load(x + i) - means) * splat(factor) * load(weight + i));
  for (; i < n; i++) narrow((widen(x[i]) - mean) * factor * widen(weight[i]), out + i);
}

// One head: x[i] cos[i] - x[i + d/2] sin[i] and x[i + d/2] cos[i + d/2] + x[i] sin[i + d/2], each product rounded.
template <class T>
void turn_head(T* x, const T* cos, const T* sin, int64_t d) {
  const int64_t half = d / 2;
  int64_t i = 0;
  for (; i + W <= half; i += W) {
    const vf a = load(x + i), b = load(x + half + i);
    store(x + i, rounded<T>(a * load(cos + i)) - rounded<T>(b * load(sin + i)));
    store(x + half + i, rounded<T>(b * load(cos + half + i)) + rounded<T>(a * load(sin + half + i)));
  }
  for (; i < half; i++) {
    const float a = widen(x[i]), b = widen(x[half + i]);
    narrow(rounded_one<T>(a * widen(cos[i])) - rounded_one<T>(b * widen(sin[i])), x + i);
    narrow(rounded_one<T>(b * widen(cos[half + i])) + rounded_one<T>(a * widen(sin[half + i])), x + half + i);
  }
}

// e^x: 2^n times 2^(what is left of x, reduced in two steps, so that large x lose nothing).
inline vf exponential(vf x) {
  const vf most = splat(88.0f), least = splat(-104.0f);
  const vf y = x > most ? most : x < least ? least : x;
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
  const vf n = (y * splat(1.44269504088896341f) + magic) - magic;
  const vf left = (y - n * splat(0.693359375f)) - n * splat(-2.12194440e-4f);
  return exp2(n) * exp2(left * splat(1.44269504088896341f));
}

inline bool is_before(float a, float b) { return a > b || (a != a && b == b); }  // larger, NaN the largest

// The k experts of one token with the largest chances [count], largest first and of equals the first, and their shares.
// Chances have `padded` places.
void choose(float* chances, int64_t count, int64_t padded, int k, float power, int32_t* experts, float* shares) {
  float most = chances[0];
  for (int64_t e = 1; e < count; e++) most = is_before(chances[e], most) ? chances[e] : most;
  for (int64_t e = count; e < padded; e++) chances[e] = -INFINITY;
  const vf base = splat(most);
  vf total{};
  for (int64_t e = 0; e < padded; e += W) {
    const vf one = exponential(load(chances + e) - base);
    store(chances + e, one);
    total += one;
  }
  const vf whole = splat(sum(total));
  for (int64_t e = 0; e < padded; e += W) store(chances + e, load(chances + e) / whole);
  int found = 0;
  for (int64_t e = 0; e < count; e++) {
    const float chance = chances[e];
    if (found == k && !is_before(chance, shares[k - 1])) continue;
    int place = found < k ? found++ : k - 1;
    for (; place > 0 && is_before(chance, shares[place - 1]); place--)
      shares[place] = shares[place - 1], experts[place] = experts[place - 1];
    shares[place] = chance, experts[place] = static_cast<int32_t>(e);
  }
  if (power == 0) return;
  float norm = 0;
  for (int i = 0; i < k; i++) norm += power == 1 ? shares[i] : shares[i] * shares[i];
  if (power != 1) norm = std::sqrt(norm);
  for (int i = 0; i < k; i++) shares[i] /= norm;
}

// The first of the largest values of a row.
template <class T>
void find_best(const T* x, int64_t n, float* value, int64_t* place) {
  constexpr int64_t BLOCK = 32 * W;
  float best = widen(x[0]);
  int64_t block = 0;
  for (int64_t first = 0; first < n && best == best; first += BLOCK) {
    const int64_t last = first + BLOCK < n ? first + BLOCK : n;
    int64_t i = first;
    float most = widen(x[first]);
    if (last - first >= W) {
      vf a = load(x + i);
      vf bad = a - a;  // NaN stays what it is added to; infinities are no reason for alarm, but are looked at below
      for (i += W; i + W <= last; i += W) {
        const vf y = load(x + i);
        a = max(y, a);
        bad += y - y;
      }
      most = largest(a);
      if (sum(bad) != 0) {  // NaN or infinity
        i = first;
        most = widen(x[first]);
      }
    }
    for (; i < last; i++) {
      const float y = widen(x[i]);
      if (is_before(y, most)) most = y;
    }
    if (is_before(most, best)) best = most, block = first;
  }
  for (int64_t i = block; i < n; i++) {
    const float y = widen(x[i]);
    if (y == best || (y != y && best != best)) {
      *value = y, *place = i;
      return;
    }
  }
}

template <class T, class U>
void put_row(const T* from, int64_t n, U* to) {
  if constexpr (std::is_same_v<T, U>) {
    std::memcpy(to, from, n * sizeof(T));
  } else {
    int64_t i = 0;
    for (; i + W <= n; i += W) store(to + i, load(from + i));
    for (; i < n; i++) narrow(widen(from[i]), to + i);
  }
}

}  // namespace

extern "C" {

// Rows of `width` values, `heads` of them side by side in every token; out may be x. by_layer: LayerNorm, else RMS norm.
void hrm_normalise(const void* x, int dtype, int64_t x_stride, const void* weight, int weight_dtype, void* out,
                   int64_t out_stride, int64_t tokens, int64_t heads, int64_t width, float eps, int by_layer,
                   int threads) {
  by_dtype(dtype, [&](auto* t) {
    by_dtype(weight_dtype, [&](auto* u) {
      using T = Pointed<decltype(t)>;
      using U = Pointed<decltype(u)>;
      share(tokens, tokens * heads * width, threads, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++)
          for (int64_t h = 0; h < heads; h++) {
            const T* const from = static_cast<const T*>(x) + i * x_stride + h * width;
            T* const to = static_cast<T*>(out) + i * out_stride + h * width;
            if (by_layer) layer_row(from, static_cast<const U*>(weight), to, width, eps);
            else rms_row(from, static_cast<const U*>(weight), to, width, eps);
          }
      });
    });
  });
}

// Queries and keys turned in place. Returns -1; or, having done nothing, the number of a token whose position has no row
// in the tables [rows, width].
int64_t hrm_turn(void* q, int64_t q_stride, int64_t q_heads, void* k, int64_t k_stride, int64_t k_heads,
                 const void* cos, const void* sin, int dtype, int64_t rows, const int64_t* positions, int64_t tokens,
                 int64_t width, int threads) {
  for (int64_t i = 0; i < tokens; i++)
    if (positions[i] < 0 || positions[i] >= rows) return i;
  by_dtype(dtype, [&](auto* t) {
    using T = Pointed<decltype(t)>;
    share(tokens, tokens * (q_heads + k_heads) * width, threads, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; i++) {
        const T* const c = static_cast<const T*>(cos) + positions[i] * width;
        const T* const s = static_cast<const T*>(sin) + positions[i] * width;
        for (int64_t h = 0; h < q_heads; h++) turn_head(static_cast<T*>(q) + i * q_stride + h * width, c, s, width);
        for (int64_t h = 0; h < k_heads; h++) turn_head(static_cast<T*>(k) + i * k_stride + h * width, c, s, width);
      }
    });
  });
  return -1;
}

// Of logits [tokens, count] the k largest chances of every token, divided by their norm of that power (0: as they are),
// sorted by expert: order [tokens * k], weights [tokens * k], starts [count + 1].
void hrm_route(const void* logits, int dtype, int64_t tokens, int64_t count, int k, float power, int64_t* order,
               float* weights, int64_t* starts, int threads) {
  std::vector<int32_t> experts(tokens * k);
  std::vector<float> shares(tokens * k);
  by_dtype(dtype, [&](auto* t) {
    using T = Pointed<decltype(t)>;
    share(tokens, tokens * count, threads, [&](int64_t first, int64_t last) {
      const int64_t padded = round_up(count, W);
      Buffer<float> chances(padded);
      for (int64_t i = first; i < last; i++) {
        put_row(static_cast<const T*>(logits) + i * count, count, chances.data);
        choose(chances.data, count, padded, k, power, experts.data() + i * k, shares.data() + i * k);
      }
    });
  });
  for (int64_t e = 0; e <= count; e++) starts[e] = 0;
  for (const int32_t e : experts) starts[e + 1]++;
  for (int64_t e = 0; e < count; e++) starts[e + 1] += starts[e];
  std::vector<int64_t> next(starts, starts + count);
  for (int64_t i = 0; i < tokens * k; i++) {
    const int64_t at = next[experts[i]]++;
    order[at] = i / k;
    weights[at] = shares[i];
  }
}

// Of every row of scores [rows, count] the largest, NaN before all others, and where it is first.
void hrm_find_best(const void* scores, int dtype, int64_t stride, int64_t rows, int64_t count, float* values,
                   int64_t* places, int threads) {
  by_dtype(dtype, [&](auto* t) {
    using T = Pointed<decltype(t)>;
    share(rows, rows * count, threads, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; i++)
        find_best(static_cast<const T*>(scores) + i * stride, count, values + i, places + i);
    });
  });
}

// Row sources[i] (row i without sources) of keys and of values goes to row places[i] of its pool, i < count. Returns -1;
// or, having done nothing, an i of which a row is not among the `tokens` rows or the `rows` rows of the pools.
int64_t hrm_put_rows(const void* keys, int64_t key_stride, const void* values, int64_t value_stride, int dtype,
                     int64_t tokens, void* key_pool, void* value_pool, int pool_dtype, int64_t pool_stride,
                     int64_t rows, const int64_t* sources, const int64_t* places, int64_t count, int64_t width,
                     int threads) {
  for (int64_t i = 0; i < count; i++) {
    const int64_t source = sources ? sources[i] : i;
    if (source < 0 || source >= tokens || places[i] < 0 || places[i] >= rows) return i;
  }
  by_dtype(dtype, [&](auto* t) {
    by_dtype(pool_dtype, [&](auto* u) {
      using T = Pointed<decltype(t)>;
      using U = Pointed<decltype(u)>;
      share(count, 2 * count * width, threads, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) {
          const int64_t source = sources ? sources[i] : i;
          put_row(static_cast<const T*>(keys) + source * key_stride, width,
                  static_cast<U*>(key_pool) + places[i] * pool_stride);
          put_row(static_cast<const T*>(values) + source * value_stride, width,
                  static_cast<U*>(value_pool) + places[i] * pool_stride);
        }
      });
    });
  });
  return -1;
}

}  // extern "C"
