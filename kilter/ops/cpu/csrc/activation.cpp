// activation(gate) * up over rows [gate; up], and its gradient.
#include "activation.h"

#include <algorithm>

#include "pool.h"

struct KtGatedActivationArgs {
  const float* gate_up;  // [rows, 2 * width], rows stride apart
  float* out;            // [rows, width]
  int64_t rows, width, stride;
  int32_t activation;
};

struct KtGatedActivationGradArgs {
  const float* grad;     // [rows, width]
  const float* gate_up;  // [rows, 2 * width], rows stride apart
  float* out;            // [rows, 2 * width]
  int64_t rows, width, stride;
  int32_t activation;
};

extern "C" void kt_gated_activation(const KtGatedActivationArgs* a) {
  using namespace kt;
  const long width = a->width, block = std::max(1L, 4096 / std::max(1L, width));
  parallel_for((a->rows + block - 1) / block, [=](long task, int) {
    const long end = std::min<long>(a->rows, (task + 1) * block);
    for (long t = task * block; t < end; ++t) {
      const float* gate = a->gate_up + t * a->stride;
      for (long i = 0; i < width; i += 16) {
        const long n = width - i;
        f32x16 y = activate(load_n(gate + i, n), a->activation) * load_n(gate + width + i, n);
        store_n(a->out + t * width + i, n, y);
      }
    }
  });
}

extern "C" void kt_gated_activation_grad(const KtGatedActivationGradArgs* a) {
  using namespace kt;
  const long width = a->width, block = std::max(1L, 4096 / std::max(1L, width));
  parallel_for((a->rows + block - 1) / block, [=](long task, int) {
    const long end = std::min<long>(a->rows, (task + 1) * block);
    for (long t = task * block; t < end; ++t) {
      const float *gate = a->gate_up + t * a->stride, *grad = a->grad + t * width;
      float* out = a->out + t * 2 * width;
      for (long i = 0; i < width; i += 16) {
        const long n = width - i;
        const f32x16 g = load_n(grad + i, n);
        f32x16 value, slope;
        activate_grad(load_n(gate + i, n), a->activation, value, slope);
        store_n(out + i, n, g * load_n(gate + width + i, n) * slope);
        store_n(out + width + i, n, g * value);
      }
    }
  });
}
