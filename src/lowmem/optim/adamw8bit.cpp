// One AdamW step with block-wise 8-bit state, in one pass over memory: see adamw8bit.py for the format.
//
// Every block of 256 elements is independent, so the bits do not depend on the number of threads. The loops are written
// for the compiler to vectorise; -fno-math-errno lets it vectorise std::sqrt. Nothing is reordered (no -ffast-math):
// a gradient that is scaled here is the gradient that was scaled before.
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

constexpr long BLOCK = 256;
constexpr int LEAST = 2;  // code of u

uint32_t bits(float x) {
    uint32_t u;
    std::memcpy(&u, &x, sizeof u);
    return u;
}

float real(uint32_t u) {
    float x;
    std::memcpy(&x, &u, sizeof x);
    return x;
}

// The three dtypes of a gradient, two of which are those of the weights on the device; rounded to nearest even.
struct Float32 {
    float value;
    operator float() const { return value; }
};

struct BFloat16 {
    uint16_t upper;
    operator float() const { return real(uint32_t(upper) << 16); }
    explicit BFloat16(float x) {
        const uint32_t u = bits(x);
        const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
        upper = uint16_t((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
    }
};

struct Float16 {
    uint16_t half;
    operator float() const {
        const uint32_t u = uint32_t(half & 0x7fffu) << 13, sign = uint32_t(half & 0x8000u) << 16;
        const uint32_t finite = bits(real(u) * 0x1p112f);  // the exponents' biases differ by 112; exact for subnormals
        return real((u >= 0x0f800000u ? u | 0x7f800000u : finite) | sign);
    }
    explicit Float16(float x) {
        const uint32_t u = bits(x) & 0x7fffffffu, sign = (bits(x) >> 16) & 0x8000u;
        const uint32_t normal = (u - 0x38000000u + 0xfffu + ((u >> 13) & 1u)) >> 13;
        const uint32_t subnormal = bits(real(u) + 0.5f) - 0x3f000000u;  // fp32's spacing at 0.5 is theirs
        uint32_t h = u < 0x38800000u ? subnormal : normal;
        h = u >= 0x47800000u ? 0x7c00u : h;
        h = u > 0x7f800000u ? 0x7e00u : h;
        half = uint16_t(h | sign);
    }
};

template <class T>
inline void widen(const T *from, float *to, int n) {
    for (int i = 0; i < n; i++) to[i] = float(from[i]);
}

template <class T>
inline void narrow(const float *from, T *to, int n) {
    for (int i = 0; i < n; i++) to[i] = T(from[i]);
}

#if defined(__F16C__)  // the conversions above in one instruction: 2 ms less per 10M parameters
template <>
inline void widen(const Float16 *from, float *to, int n) {
    int i = 0;
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
    for (; i < n; i++) to[i] = float(from[i]);
}

template <>
inline void narrow(const float *from, Float16 *to, int n) {
    int i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
    for (; i < n; i++) to[i] = Float16(from[i]);
}
#endif

// In the order of `_rule` in adamw8bit.py.
struct Rule {
    float rate, keep, beta1, rest1, beta2, rest2, eps, widened, unscale, limit, clip;
};

struct State {
    int8_t *m;
    uint8_t *u;
    float *m_top, *u_top;  // of each block
};

template <class G, class W>
void block(float *p, const G *g, const State s, W *out, int n, const Rule &r) {
    float m[BLOCK], u[BLOCK], t[BLOCK];
    const float m_unit = *s.m_top / (127 * 127), u_unit = *s.u_top / (255 * 255);
    uint32_t m_top = 0, u_top = 0;  // of positive numbers: their bits have their order
    widen(g, t, n);
    for (int i = 0; i < n; i++) {
        float x = t[i] * r.unscale;
        x = x < -r.limit ? -r.limit : x > r.limit ? r.limit : x;
        x = x * r.clip;
        const float a = float(s.m[i]), b = float(s.u[i]);
        const float old = b * b * u_unit;
        m[i] = r.beta1 * (a * std::fabs(a) * m_unit) + r.rest1 * x;
        u[i] = std::sqrt(r.beta2 * (old * old) + r.rest2 * (x * x));
        p[i] = p[i] * r.keep - r.rate * (m[i] / (u[i] * r.widened + r.eps));
        const uint32_t m_size = bits(m[i]) & 0x7fffffffu, u_size = bits(u[i]);
        m_top = m_size > m_top ? m_size : m_top;
        u_top = u_size > u_top ? u_size : u_top;
    }
    *s.m_top = real(m_top);
    *s.u_top = real(u_top);
    const float m_inverse = m_top ? 127.0f * 127.0f / *s.m_top : 0.0f;
    const float u_inverse = u_top ? 255.0f * 255.0f / *s.u_top : 0.0f;
    for (int i = 0; i < n; i++) {
        const int a = int(std::sqrt(std::fabs(m[i]) * m_inverse) + 0.5f);
        const int b = int(std::sqrt(u[i] * u_inverse) + 0.5f);
        s.m[i] = int8_t(m[i] < 0 ? -a : a);
        s.u[i] = uint8_t(b > LEAST ? b : LEAST);
    }
    if (out) narrow(p, out, n);
}

template <class G, class W>
void step(float *p, const void *gradient, const State s, void *rounded, long n, const Rule &r, int threads) {
    const G *g = static_cast<const G *>(gradient);
    W *out = static_cast<W *>(rounded);
    const long blocks = (n + BLOCK - 1) / BLOCK;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long b = 0; b < blocks; b++) {
        const long at = b * BLOCK;
        const State here = {s.m + at, s.u + at, s.m_top + b, s.u_top + b};
        W *to = out ? out + at : nullptr;
        if (n - at >= BLOCK)
            block<G, W>(p + at, g + at, here, to, BLOCK, r);  // a constant: the loops have no tails
        else
            block<G, W>(p + at, g + at, here, to, int(n - at), r);
    }
}

template <class G>
void step(int out, float *p, const void *g, const State s, void *rounded, long n, const Rule &r, int threads) {
    if (out == 2)
        step<G, Float16>(p, g, s, rounded, n, r, threads);
    else
        step<G, BFloat16>(p, g, s, rounded, n, r, threads);
}

}  // namespace

// dtypes: 0 fp32, 1 bf16, 2 fp16; `rounded` is null where nobody wants the new weights in 16 bits.
extern "C" void adamw8bit(float *p, const void *gradient, int gradient_dtype, int8_t *m, uint8_t *u, float *m_top,
                          float *u_top, void *rounded, int rounded_dtype, long n, const float *rule, int threads) {
    const State s = {m, u, m_top, u_top};
    Rule r;
    std::memcpy(&r, rule, sizeof r);
    if (gradient_dtype == 0)
        step<Float32>(rounded_dtype, p, gradient, s, rounded, n, r, threads);
    else if (gradient_dtype == 1)
        step<BFloat16>(rounded_dtype, p, gradient, s, rounded, n, r, threads);
    else
        step<Float16>(rounded_dtype, p, gradient, s, rounded, n, r, threads);
}
