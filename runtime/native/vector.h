// Vectors of float32 with one register's width, and loads that widen bf16 and fp16 on the way.
// GCC vector extensions for the arithmetic; intrinsics only where they say what the compiler does not find by itself.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define HRM_AVX512 1
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define HRM_AVX2 1
#endif
#if defined(HRM_AVX512) && defined(__AVX512BF16__)
#define HRM_BF16_DOT 1  // vdpbf16ps: two products of bf16 pairs added to a float32 lane
#endif

namespace hrm {

#if defined(HRM_AVX512)
constexpr int W = 16;  // float32 lanes of a register
#else
constexpr int W = 8;  // on machines without AVX2 the compiler takes two registers
#endif

typedef float vf __attribute__((vector_size(W * 4), may_alias));
typedef int32_t vi __attribute__((vector_size(W * 4), may_alias));
typedef uint32_t vu __attribute__((vector_size(W * 4), may_alias));
typedef uint16_t vh __attribute__((vector_size(W * 2), may_alias));

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

// Numbers of the dtypes, the same in native_library.py.
enum Dtype { FP32 = 0, BF16 = 1, FP16 = 2 };

// f(0), f(1), ..., f(N - 1), each with its number as a constant: GCC keeps an array of vectors in registers only where
// every index is a constant from the start, which unrolled loops come to too late. Functions that use it are marked
// [[gnu::flatten]], so that every f is inlined.
template <class F, int... I>
[[gnu::always_inline]] inline void call_each(F&& f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F>
[[gnu::always_inline]] inline void unroll(F&& f) {
  call_each(static_cast<F&&>(f), std::make_integer_sequence<int, N>{});
}

inline vf splat(float x) { return x - vf{}; }  // x - 0 is x for every x

inline float as_float(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline uint32_t as_bits(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }

inline float widen(float x) { return x; }
inline float widen(bf16 x) { return as_float(static_cast<uint32_t>(x.bits) << 16); }
inline float widen(fp16 x) {
#if defined(HRM_AVX512) || defined(HRM_AVX2)
  return _cvtsh_ss(x.bits);
#else
  const uint32_t sign = (x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
  if (rest >= 0x7c00u) return as_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);  // infinity, NaN
  // Read as if the exponent had float32's bias, times 2^112: right for subnormal numbers too.
  return as_float(sign | as_bits(as_float(rest << 13) * 0x1p112f));
#endif
}

inline void narrow(float x, float* out) { *out = x; }
inline void narrow(float x, bf16* out) {  // to nearest, ties to even
  const uint32_t bits = as_bits(x);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  out->bits = is_nan ? 0x7fc0u : static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
inline void narrow(float x, fp16* out) {
#if defined(HRM_AVX512) || defined(HRM_AVX2)
  out->bits = static_cast<uint16_t>(_cvtss_sh(x, 0));
#else
  const uint32_t bits = as_bits(x), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
  uint32_t half;
  if (rest > 0x7f800000u) half = 0x7e00u;
  else if (rest >= 0x477ff000u) half = 0x7c00u;  // rounds to 65536: infinity
  else if (rest < 0x38800000u) half = as_bits(as_float(rest) + 0.5f) - 0x3f000000u;  // subnormal: in steps of 2^-24
  else half = (rest - 0x38000000u + 0xfffu + (rest >> 13 & 1u)) >> 13;
  out->bits = static_cast<uint16_t>(sign | half);
#endif
}

inline vf load(const float* p) { vf x; std::memcpy(&x, p, sizeof x); return x; }
inline vf load(const bf16* p) {
#if defined(HRM_AVX512)
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(HRM_AVX2)
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
  vh x;
  std::memcpy(&x, p, sizeof x);
  return (vf)(__builtin_convertvector(x, vu) << 16);
#endif
}
inline vf load(const fp16* p) {
#if defined(HRM_AVX512)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(HRM_AVX2)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  vf x;
  for (int i = 0; i < W; i++) x[i] = widen(p[i]);
  return x;
#endif
}
inline void store(float* p, vf x) { std::memcpy(p, &x, sizeof x); }
inline void store(bf16* p, vf x) {  // to nearest, ties to even
  const vu bits = (vu)x;
  const vu rounded = (x == x ? bits + 0x7fffu + (bits >> 16 & 1u) : vu{} + 0x7fc00000u) >> 16;
#if defined(HRM_AVX512)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)rounded));
#else
  const vh half = __builtin_convertvector(rounded, vh);
  std::memcpy(p, &half, sizeof half);
#endif
}
inline void store(fp16* p, vf x) {
#if defined(HRM_AVX512)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)x, 0));
#elif defined(HRM_AVX2)
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)x, 0));
#else
  for (int i = 0; i < W; i++) narrow(x[i], p + i);
#endif
}

// x as it reads once it was written as a T.
template <class T>
inline vf rounded(vf x) {
  T kept[W];
  store(kept, x);
  return load(kept);
}
template <>
inline vf rounded<float>(vf x) { return x; }
template <>
inline vf rounded<bf16>(vf x) {
  const vu bits = (vu)x;
  return (vf)((x == x ? bits + 0x7fffu + (bits >> 16 & 1u) : vu{} + 0x7fc00000u) & 0xffff0000u);
}
template <class T>
inline float rounded_one(float x) {
  T kept;
  narrow(x, &kept);
  return widen(kept);
}

inline vf max(vf a, vf b) { return a > b ? a : b; }

inline float sum(vf x) {
  float y[W], total = 0;
  store(y, x);
  for (int i = 0; i < W; i++) total += y[i];
  return total;
}

// out[0..3] = the sums of the lanes of a, b, c, d.
inline void sum4(vf a, vf b, vf c, vf d, float* out) {
#if defined(HRM_AVX512)
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b), _mm512_unpackhi_ps((__m512)a, (__m512)b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps((__m512)c, (__m512)d), _mm512_unpackhi_ps((__m512)c, (__m512)d));
  const __m512 abcd = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#elif defined(HRM_AVX2)
  const __m256 ab = _mm256_hadd_ps((__m256)a, (__m256)b), cd = _mm256_hadd_ps((__m256)c, (__m256)d);
  const __m256 abcd = _mm256_hadd_ps(ab, cd);
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
#else
  out[0] = sum(a), out[1] = sum(b), out[2] = sum(c), out[3] = sum(d);
#endif
}

// 2^x, relative error about 2e-7; NaN stays NaN, 2^-infinity and what would be subnormal are 0.
inline vf exp2(vf x) {
  const vf least = splat(-126.0f), most = splat(127.0f);
  const vf y = x < least ? least : x > most ? most : x;
#if defined(HRM_AVX512)
  const vf n = (vf)_mm512_roundscale_ps((__m512)y, 0);
#else
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
  const vf shifted = y + magic;
  const vf n = shifted - magic;
#endif
  const vf r = y - n;  // |r| <= 1/2; the polynomial is Cephes' exp2f (S. L. Moshier)
  vf p = splat(1.535336188319500e-4f);
  p = p * r + splat(1.339887440266574e-3f);
  p = p * r + splat(9.618437357674640e-3f);
  p = p * r + splat(5.550332471162809e-2f);
  p = p * r + splat(2.402264791363012e-1f);
  p = p * r + splat(6.931472028550421e-1f);
  p = p * r + splat(1.0f);
#if defined(HRM_AVX512)
  const vf power = (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  const vf power = p * (vf)(((vi)shifted + 127) << 23);  // the low bits of 1.5 * 2^23 + n are n
#endif
  return x < least ? vf{} : power;
}

inline float largest(vf x) {
#if defined(HRM_AVX512)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float most = x[0];
  for (int i = 1; i < W; i++) most = x[i] > most ? x[i] : most;
  return most;
#endif
}

// Two ways to multiply vectors of a and b into float32 sums: widened to float32 first, or bf16 in pairs.
struct Widened {
  static constexpr int step = W;
  template <class T> static vf get(const T* p) { return load(p); }
  static vf add(vf sum, vf a, vf b) { return sum + a * b; }
};
#if defined(HRM_BF16_DOT)
struct Pairs {
  static constexpr int step = 2 * W;
  static vf get(const bf16* p) { return (vf)_mm512_loadu_si512(p); }
  static vf add(vf sum, vf a, vf b) { return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }
};
#endif

// Memory of a cache line's alignment, uninitialised.
template <class T>
struct Buffer {
  T* data;
  explicit Buffer(int64_t n) : data(static_cast<T*>(std::aligned_alloc(64, (n * sizeof(T) + 64) / 64 * 64))) {}
  ~Buffer() { std::free(data); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
};

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Asks for a cache line.
// The empty asm: GCC takes a function that only prefetches for one without effect and drops calls of it.
[[gnu::always_inline]] inline void prefetch(const void* p) {
  __builtin_prefetch(p, 0, 3);
  asm volatile("" : : "r"(p));
}

}  // namespace hrm
