// RMS norm over rows, with the residual add of a post-norm; and its gradient.
#include "norm.h"

#include <algorithm>

#include "pool.h"
#include "scratch.h"

struct KtRmsNormArgs {
  const float* x;  // [rows, dim], rows x_stride apart
  const float* weight;
  const float* residual;  // null, or [rows, dim]
  float* out;             // [rows, dim]
  int64_t rows, dim, x_stride;
  float eps;
  int32_t zero_centred;
};

struct KtRmsNormGradArgs {
  const float* grad;  // [rows, dim]
  const float* x;     // [rows, dim], rows x_stride apart
  const float* weight;
  float* dx;       // [rows, dim]
  float* dweight;  // [dim]
  int64_t rows, dim, x_stride;
  float eps;
  int32_t zero_centred;
};

extern "C" void kt_rms_norm(const KtRmsNormArgs* a) {
  using namespace kt;
  const long dim = a->dim, block = std::max(1L, 16384 / std::max(1L, dim));
  parallel_for((a->rows + block - 1) / block, [=](long task, int) {
    const long end = std::min<long>(a->rows, (task + 1) * block);
    for (long t = task * block; t < end; ++t) {
      const float* x = a->x + t * a->x_stride;
      float* out = a->out + t * dim;
      const float scale = rms_scale(x, dim, a->eps);
      for (long i = 0; i < dim; i += 16) {
        const long n = dim - i;
        f32x16 y = rms_apply(load_n(x + i, n), scale, load_n(a->weight + i, n), a->zero_centred);
        if (a->residual) y = load_n(a->residual + t * dim + i, n) + y;
        store_n(out + i, n, y);
      }
    }
  });
}

extern "C" void kt_rms_norm_grad(const KtRmsNormGradArgs* a) {
  using namespace kt;
  constexpr long kBlock = 64;  // rows whose weight gradients are summed together
  const long dim = a->dim, blocks = (a->rows + kBlock - 1) / kBlock;
  thread_local Scratch scratch;
  float* parts = scratch.get(std::max(1L, blocks) * dim);
  std::fill_n(parts, std::max(1L, blocks) * dim, 0.0f);
  parallel_for(blocks, [=](long block, int) {
    const long end = std::min<long>(a->rows, (block + 1) * kBlock);
    for (long t = block * kBlock; t < end; ++t)
      rms_grad(a->x + t * a->x_stride, a->grad + t * dim, a->weight, dim, a->eps, a->zero_centred,
               a->dx + t * dim, parts + block * dim);
  });
  add_parts(parts, std::max(1L, blocks), dim, a->dweight);
}
