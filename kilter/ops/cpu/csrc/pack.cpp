// Row-major weights to packed panels (formats.h), and packed panels back to fp32 rows.
#include <atomic>

#include "formats.h"
#include "pool.h"

namespace kt {

struct KtPackArgs {
  KtMatrix source;     // a plain matrix, or with `q`: nothing but its sizes
  const int8_t* q;     // [n][k] already quantised, or null
  const float* scale;  // [n][k / group], with `q`
  const float* min;    // [n][k / group] or null, with `q`
  KtMatrix target;     // its data is written
  int64_t* bad;        // out: how many groups a quantised target cannot hold
};

struct KtUnpackArgs {
  KtMatrix source;  // packed
  float* out;       // [n][k]
};

namespace {

constexpr long kRun = 128;  // k handled at a time where there are no groups

template <class T>
void pack_elements(const Layout& from, const Layout& to, long p) {
  alignas(64) float values[kRun * 16];
  T* out = (T*)to.panel(p);
  for (long k = 0; k < from.k; k += kRun) {
    const long n = std::min(kRun, from.k - k);
    widen(from, p, k, k + n, values);
    for (long i = 0; i < n; ++i) store(out + (k + i) * 16, load(values + i * 16));
  }
}

void put_scales(uint8_t* out, int scale_bytes, const float* values) {
  for (int i = 0; i < 16; ++i) {
    if (scale_bytes == 4) {
      std::memcpy(out + i * 4, &values[i], 4);
    } else {
      const uint16_t h = float_to_f16(values[i]);
      std::memcpy(out + i * 2, &h, 2);
    }
  }
}

// One group of 16 lanes: q [16][group] (row-major), scales and mins of the lanes.
void put_group(const Layout& to, uint8_t* out, const int8_t* q, const float* scale,
               const float* min) {
  put_scales(out, to.scale_bytes, scale);
  out += 16 * to.scale_bytes;
  if (to.storage != kInt8) {
    put_scales(out, to.scale_bytes, min);
    out += 16 * to.scale_bytes;
  }
  if (to.storage != kInt4) {
    for (int j = 0; j < to.group; ++j)
      for (int i = 0; i < 16; ++i) out[j * 16 + i] = uint8_t(q[i * to.group + j]);
    return;
  }
  for (int j = 0; j < to.group; j += 8) {
    for (int i = 0; i < 16; ++i, out += 4) {
      uint32_t word = 0;
      for (int b = 0; b < 8; ++b) word |= uint32_t(q[i * to.group + j + b] & 15) << (4 * b);
      std::memcpy(out, &word, 4);
    }
  }
}

void pack_quantised(const KtPackArgs& a, const Layout& to, long p) {
  const long groups = to.k / to.group, row = to.row(p), lanes = to.lanes(p);
  for (long g = 0; g < groups; ++g) {
    int8_t q[16 * 32] = {};
    float scale[16] = {}, min[16] = {};
    for (long i = 0; i < lanes; ++i) {
      std::memcpy(q + i * to.group, a.q + (row + i) * to.k + g * to.group, size_t(to.group));
      scale[i] = a.scale[(row + i) * groups + g];
      min[i] = a.min ? a.min[(row + i) * groups + g] : -0.0f;  // w + -0 is w, whatever w is
    }
    put_group(to, const_cast<uint8_t*>(to.panel(p)) + g * to.group_bytes, q, scale, min);
  }
}

// Rounds to the nearest whole number, ties to even, within lo..hi.
KT_INLINE f32x16 whole(f32x16 v, float lo, float hi) {
  const f32x16 magic = set1(12582912.0f);
  return (min(set1(hi), max(set1(lo), v)) + magic) - magic;
}

// int8: scale = absmax / 127, q = v / scale. int4: scale = (hi - lo) / 15, min = lo,
// q = (v - min) / scale. Scale and min are first rounded to fp16, as they are stored. Returns how
// many lanes have no fp16 scale (an infinity, a NaN, too large).
int quantise_group(const Layout& to, const float* values, long n, uint8_t* out) {
  f32x16 lo = load(values), hi = lo, poison = zero();
  for (long j = 0; j < n; ++j) {
    const f32x16 v = load(values + j * 16);
    lo = min(lo, v);
    hi = max(hi, v);
    poison = fma(v, zero(), poison);
  }
  const bool four = to.storage == kInt4;
  float scale[16], low[16], divisor[16];
  store(scale, four ? (hi - lo) / set1(15.0f) + poison
                    : max(hi, zero() - lo) / set1(127.0f) + poison);
  store(low, four ? lo : zero());
  int bad = 0;
  for (int i = 0; i < 16; ++i) {
    scale[i] = f16_to_float(float_to_f16(scale[i]));
    low[i] = f16_to_float(float_to_f16(low[i]));
    divisor[i] = scale[i] == 0.0f ? 1.0f : scale[i];
    bad += !(std::fabs(scale[i]) + std::fabs(low[i]) < INFINITY);
  }
  int8_t q[16 * 32] = {};
  for (long j = 0; j < n; ++j) {
    const f32x16 v = load(values + j * 16);
    float t[16];
    store(t, four ? whole((v - load(low)) / load(divisor), 0.0f, 15.0f)
                  : whole(v / load(divisor), -127.0f, 127.0f));
    for (int i = 0; i < 16; ++i) q[i * to.group + j] = t[i] == t[i] ? int8_t(t[i]) : int8_t(0);
  }
  put_group(to, out, q, scale, low);
  return bad;
}

int quantise(const Layout& from, const Layout& to, long p) {
  alignas(64) float values[32 * 16];
  int bad = 0;
  uint8_t* out = const_cast<uint8_t*>(to.panel(p));
  for (long k = 0; k < from.k; k += to.group, out += to.group_bytes) {
    const long n = std::min(long(to.group), from.k - k);
    widen(from, p, k, k + n, values);
    bad += quantise_group(to, values, n, out);
  }
  return bad;
}

void unpack(const Layout& from, long p, float* out) {
  alignas(64) float values[kRun * 16];
  const long row = from.row(p), lanes = from.lanes(p);
  for (long k = 0; k < from.k; k += kRun) {
    const long n = std::min(kRun, from.k - k);
    widen(from, p, k, k + n, values);
    for (long i = 0; i < lanes; ++i)
      for (long j = 0; j < n; ++j) out[(row + i) * from.k + k + j] = values[j * 16 + i];
  }
}

}  // namespace
}  // namespace kt

extern "C" void kt_pack(const kt::KtPackArgs* a) {
  using namespace kt;
  const Layout from(a->source), to(a->target);
  std::atomic<int64_t> bad{0};
  parallel_for(to.panels, [&](long p, int) {
    if (a->q) return pack_quantised(*a, to, p);
    switch (to.storage) {
      case kFp32: return pack_elements<float>(from, to, p);
      case kBf16: return pack_elements<bf16>(from, to, p);
      case kFp16: return pack_elements<f16>(from, to, p);
      default: bad += quantise(from, to, p);
    }
  });
  *a->bad = bad;
}

extern "C" void kt_unpack(const kt::KtUnpackArgs* a) {
  const kt::Layout from(a->source);
  kt::parallel_for(from.panels, [&](long p, int) { kt::unpack(from, p, a->out); });
}
