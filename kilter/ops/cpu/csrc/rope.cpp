// From the fused qkv rows to rotated queries and stored keys and values: per-head norms of q and
// k, the rotation, the narrowing and the write into the cache, in one pass over the tokens; and the
// gradient of all that, back to the fused rows.
#include <algorithm>
#include <atomic>

#include "norm.h"
#include "pool.h"
#include "scratch.h"

struct KtRopeQkvArgs {
  const float* qkv;          // [tokens, groups, queries + 2, dim]
  const int32_t* positions;  // [tokens]
  const float* cos;          // [num_positions, dim / 2]
  const float* sin;
  const float* q_norm;   // null, or [dim]
  const float* k_norm;   // null, or [dim]
  const int32_t* slots;  // null (token t is slot t), or [tokens]
  float* q;              // [tokens, groups * queries, dim]
  void* k;               // [num_slots, groups, dim]
  void* v;
  int32_t* status;  // set to 1 for a position, 2 for a slot out of range
  int64_t tokens, groups, queries, dim, num_positions, num_slots;
  float eps;
  int32_t zero_centred;
  int32_t kv_type;  // 0 fp32, 1 bf16, 2 fp16
};

struct KtRopeQkvGradArgs {
  const float *dq, *dk, *dv;  // [tokens, groups * queries, dim], [tokens, groups, dim] twice
  const float* qkv;           // [tokens, groups, queries + 2, dim]
  const int32_t* positions;   // [tokens]
  const float* cos;           // [num_positions, dim / 2]
  const float* sin;
  const float* q_norm;  // null, or [dim]
  const float* k_norm;  // null, or [dim]
  float* dqkv;          // as qkv
  float* dq_norm;       // [dim] where there is a norm
  float* dk_norm;
  int64_t tokens, groups, queries, dim;
  float eps;
  int32_t zero_centred;
};

namespace kt {
namespace {

// One head: optional norm, then x_j, x_{j+h} -> x_j c_j - x_{j+h} s_j, x_{j+h} c_j + x_j s_j.
template <class T>
void rotate(const float* x, const float* norm, const KtRopeQkvArgs* a, long position, T* out) {
  const long half = a->dim / 2;
  const float *cos = a->cos + position * half, *sin = a->sin + position * half;
  const float scale = norm ? rms_scale(x, a->dim, a->eps) : 1.0f;
  for (long j = 0; j < half; j += 16) {
    const long n = half - j;
    f32x16 lo = load_n(x + j, n), hi = load_n(x + half + j, n);
    if (norm) {
      lo = rms_apply(lo, scale, load_n(norm + j, n), a->zero_centred);
      hi = rms_apply(hi, scale, load_n(norm + half + j, n), a->zero_centred);
    }
    f32x16 c = load_n(cos + j, n), s = load_n(sin + j, n);
    store_n(out + j, n, lo * c - hi * s);
    store_n(out + half + j, n, hi * c + lo * s);
  }
}

// A token whose position or slot is out of range stores nothing, and its queries become NaN: a
// replayed tape, where nobody reads the status, shows it too.
template <class T>
void token(const KtRopeQkvArgs* a, long t) {
  const long dim = a->dim, row = (a->queries + 2) * dim, position = a->positions[t];
  const long slot = a->slots ? a->slots[t] : t;
  const bool bad_position = position < 0 || position >= a->num_positions;
  float* q = a->q + t * a->groups * a->queries * dim;
  if (bad_position || slot < 0 || slot >= a->num_slots) {
    std::atomic_ref<int32_t>(*a->status).store(bad_position ? 1 : 2, std::memory_order_relaxed);
    std::fill_n(q, a->groups * a->queries * dim, NAN);
    return;
  }
  for (long g = 0; g < a->groups; ++g) {
    const float* x = a->qkv + (t * a->groups + g) * row;
    for (long r = 0; r < a->queries; ++r, x += dim, q += dim) rotate(x, a->q_norm, a, position, q);
    const long to = (slot * a->groups + g) * dim;
    rotate(x, a->k_norm, a, position, static_cast<T*>(a->k) + to);
    x += dim;
    for (long j = 0; j < dim; j += 16)
      store_n(static_cast<T*>(a->v) + to + j, dim - j, load_n(x + j, dim - j));
  }
}

// One head's gradient turned back; with a norm also taken back through it.
void rotate_back(const float* grad, const float* x, const float* norm, const KtRopeQkvGradArgs* a,
                 long position, float* out, float* dnorm) {
  const long half = a->dim / 2;
  const float *cos = a->cos + position * half, *sin = a->sin + position * half;
  for (long j = 0; j < half; j += 16) {
    const long n = half - j;
    const f32x16 lo = load_n(grad + j, n), hi = load_n(grad + half + j, n);
    const f32x16 c = load_n(cos + j, n), s = load_n(sin + j, n);
    store_n(out + j, n, lo * c + hi * s);
    store_n(out + half + j, n, hi * c - lo * s);
  }
  if (norm) rms_grad(x, out, norm, a->dim, a->eps, a->zero_centred, out, dnorm);
}

}  // namespace
}  // namespace kt

extern "C" void kt_rope_qkv(const KtRopeQkvArgs* a) {
  using namespace kt;
  const auto one = a->kv_type == 0 ? token<float> : a->kv_type == 1 ? token<bf16> : token<f16>;
  const long width = a->groups * (a->queries + 2) * a->dim;
  const long block = std::max(1L, 16384 / std::max(1L, width));
  parallel_for((a->tokens + block - 1) / block, [=](long task, int) {
    const long end = std::min<long>(a->tokens, (task + 1) * block);
    for (long t = task * block; t < end; ++t) one(a, t);
  });
}

extern "C" void kt_rope_qkv_grad(const KtRopeQkvGradArgs* a) {
  using namespace kt;
  constexpr long kBlock = 32;  // tokens whose norms' gradients are summed together
  const long dim = a->dim, heads = a->queries + 2, blocks = (a->tokens + kBlock - 1) / kBlock;
  thread_local Scratch scratch;
  const long parts = std::max(1L, blocks);
  float* dnorms = scratch.get(2 * parts * dim);
  std::fill_n(dnorms, 2 * parts * dim, 0.0f);
  parallel_for(blocks, [=](long block, int) {
    float *dq_norm = dnorms + block * dim, *dk_norm = dnorms + (parts + block) * dim;
    const long end = std::min<long>(a->tokens, (block + 1) * kBlock);
    for (long i = block * kBlock * a->groups; i < end * a->groups; ++i) {
      const long position = a->positions[i / a->groups];
      const float *x = a->qkv + i * heads * dim, *dq = a->dq + i * a->queries * dim;
      float* out = a->dqkv + i * heads * dim;
      for (long r = 0; r < a->queries; ++r, x += dim, dq += dim, out += dim)
        rotate_back(dq, x, a->q_norm, a, position, out, dq_norm);
      rotate_back(a->dk + i * dim, x, a->k_norm, a, position, out, dk_norm);
      std::copy_n(a->dv + i * dim, dim, out + dim);
    }
  });
  if (a->q_norm) add_parts(dnorms, parts, dim, a->dq_norm);
  if (a->k_norm) add_parts(dnorms + parts * dim, parts, dim, a->dk_norm);
}
