// What the machine can do at most: the roofs that the kernels are measured against.
#include <omp.h>

#include "vector.h"

using namespace hrm;

extern "C" {

// Reads `bytes` once with all threads, each its own slice; returns a sum, so that nothing is left out.
int64_t hrm_read(const void* data, int64_t bytes, int threads) {
  int64_t total = 0;
#pragma omp parallel num_threads(threads) reduction(+ : total)
  {
    const int64_t line = 64, lines = bytes / line, n = omp_get_num_threads(), i = omp_get_thread_num();
    const char* p = static_cast<const char*>(data);
    const int64_t first = lines * i / n, last = lines * (i + 1) / n;
    vi a{}, b{};
    for (int64_t k = first; k < last; k++) {
      vi x, y;
      std::memcpy(&x, p + k * line, sizeof x);
      std::memcpy(&y, p + k * line + line - sizeof y, sizeof y);
      a += x, b += y;
    }
    a += b;
    for (int k = 0; k < W; k++) total += a[k];
  }
  return total;
}

// Multiply-adds in registers, `rounds` of 16 vectors per thread; *flop is what was done. bf16: pairs through vdpbf16ps
// where the machine has it, else 0.
float hrm_multiply_add(int64_t rounds, int is_bf16, int threads, double* flop) {
  float total = 0;
  double done = 0;
#pragma omp parallel num_threads(threads) reduction(+ : total, done)
  {
    vf sums[16];
    unroll<16>([&](auto k) { sums[k] = splat(static_cast<float>(k)); });
    vf a = splat(0.5f), b = splat(0.25f);
    if (!is_bf16) {
      for (int64_t i = 0; i < rounds; i++) {
        unroll<16>([&](auto k) { sums[k] = sums[k] * a + b; });
      }
      done = static_cast<double>(rounds) * 16 * W * 2;
    }
#if defined(HRM_BF16_DOT)
    else {
      for (int64_t i = 0; i < rounds; i++) {
        unroll<16>([&](auto k) { sums[k] = (vf)_mm512_dpbf16_ps((__m512)sums[k], (__m512bh)a, (__m512bh)b); });
      }
      done = static_cast<double>(rounds) * 16 * W * 4;
    }
#endif
    unroll<16>([&](auto k) { total += sum(sums[k]); });
  }
  *flop = done;
  return total;
}

int hrm_pool_threads() { return omp_get_max_threads(); }

// Which instructions the kernels were compiled for: 0 generic, 2 AVX2, 5 AVX-512, 6 AVX-512 with bf16 products.
int hrm_instructions() {
#if defined(HRM_BF16_DOT)
  return 6;
#elif defined(HRM_AVX512)
  return 5;
#elif defined(HRM_AVX2)
  return 2;
#else
  return 0;
#endif
}
}
