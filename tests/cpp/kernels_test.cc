// Reduction kernels of every instruction set against a float64 reference: every dtype and
// reduction, odd lengths, misaligned pointers; 16-bit floats exhaustively; the CUDA bodies' index
// arithmetic on the CPU.
#include <gtest/gtest.h>

#include <cmath>
#include <complex>
#include <cstring>
#include <limits>

#include "base/rng.h"
#include "kernels/dispatch.h"
#include "kernels/reduce.h"
#include "kernels/reduce_cuda_body.h"

namespace pycomm::kernels {
namespace {

constexpr ReduceOp kOps[] = {ReduceOp::kSum,   ReduceOp::kAvg,   ReduceOp::kProduct,
                             ReduceOp::kMin,   ReduceOp::kMax,   ReduceOp::kBitAnd,
                             ReduceOp::kBitOr, ReduceOp::kBitXor};

// Small whole numbers: exact in every type, so results must match to the last bit.
template <class T>
T element(std::uint64_t value) {
  if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>) {
    return T::from_accumulator(static_cast<float>(static_cast<int>(value % 9) - 4));
  } else if constexpr (std::is_same_v<T, Bool>) {
    return Bool{static_cast<std::uint8_t>(value % 2)};
  } else if constexpr (is_complex_v<T>) {
    using R = decltype(T::re);
    return {static_cast<R>(value % 5), static_cast<R>(static_cast<int>(value / 5 % 5) - 2)};
  } else {
    return static_cast<T>(value % 9);
  }
}

template <class T>
std::complex<double> number(T value) {
  if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>) {
    return static_cast<double>(value.to_accumulator());
  } else if constexpr (std::is_same_v<T, Bool>) {
    return static_cast<double>(value.bits);
  } else if constexpr (is_complex_v<T>) {
    return {static_cast<double>(value.re), static_cast<double>(value.im)};
  } else {
    return static_cast<double>(value);
  }
}

std::complex<double> reference(std::complex<double> a, std::complex<double> b, ReduceOp op,
                               bool is_bool) {
  const auto x = static_cast<std::int64_t>(a.real());
  const auto y = static_cast<std::int64_t>(b.real());
  if (is_bool) {
    const bool p = x != 0, q = y != 0;
    switch (op) {
      case ReduceOp::kProduct:
      case ReduceOp::kMin:
      case ReduceOp::kBitAnd: return p && q;
      case ReduceOp::kBitXor: return p != q;
      default: return p || q;
    }
  }
  switch (op) {
    case ReduceOp::kProduct: return a * b;
    case ReduceOp::kMin: return std::min(a.real(), b.real());
    case ReduceOp::kMax: return std::max(a.real(), b.real());
    case ReduceOp::kBitAnd: return static_cast<double>(x & y);
    case ReduceOp::kBitOr: return static_cast<double>(x | y);
    case ReduceOp::kBitXor: return static_cast<double>(x ^ y);
    default: return a + b;
  }
}

class Kernels : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    kernels_ = reduce_kernels_named(GetParam());
    if (kernels_ == nullptr) GTEST_SKIP() << "this processor or build has no " << GetParam();
  }
  const ReduceKernels* kernels_ = nullptr;
};

TEST_P(Kernels, CombineEqualsTheReferenceForEveryTypeAndReduction) {
  base::Rng rng(7);
  for (int d = 0; d < kNumDTypes; ++d) {
    const auto dtype = static_cast<DType>(d);
    with_element_type(dtype, [&](auto zero) {
      using T = decltype(zero);
      for (const ReduceOp op : kOps) {
        if (!is_reducible(dtype, op)) continue;
        for (const std::uint64_t count : {0u, 1u, 3u, 15u, 16u, 17u, 63u, 129u, 1000u}) {
          for (const std::size_t shift : {0u, 1u, 3u}) {
            std::vector<std::byte> a(count * sizeof(T) + 8), b = a, out(count * sizeof(T) + 8);
            for (std::uint64_t i = 0; i < count; ++i) {
              const T x = element<T>(rng.next()), y = element<T>(rng.next());
              std::memcpy(a.data() + shift + i * sizeof(T), &x, sizeof(T));
              std::memcpy(b.data() + shift + i * sizeof(T), &y, sizeof(T));
            }
            const std::byte guard{0x5a};
            out[shift + count * sizeof(T)] = guard;
            kernels_->combine(out.data() + shift, a.data() + shift, b.data() + shift, count, dtype,
                              op);
            ASSERT_EQ(out[shift + count * sizeof(T)], guard);
            for (std::uint64_t i = 0; i < count; ++i) {
              T x, y, z;
              std::memcpy(&x, a.data() + shift + i * sizeof(T), sizeof(T));
              std::memcpy(&y, b.data() + shift + i * sizeof(T), sizeof(T));
              std::memcpy(&z, out.data() + shift + i * sizeof(T), sizeof(T));
              ASSERT_EQ(number(z), reference(number(x), number(y), op, std::is_same_v<T, Bool>))
                  << to_string(dtype) << " " << to_string(op) << " element " << i;
            }
          }
        }
      }
    });
  }
}

TEST_P(Kernels, CopiesPastTheCacheCopyEveryByte) {
  for (const std::uint64_t bytes : {0u, 1u, 63u, 64u, 200u, 5000u}) {
    for (const std::size_t shift : {0u, 1u, 33u}) {
      std::vector<std::byte> from(bytes), to(bytes + 128, std::byte{0x5a});
      for (std::size_t i = 0; i < bytes; ++i) from[i] = static_cast<std::byte>(i * 7);
      kernels_->stream(to.data() + shift, from.data(), bytes);
      ASSERT_TRUE(std::equal(from.begin(), from.end(), to.begin() + static_cast<long>(shift)));
      ASSERT_EQ(to[shift + bytes], std::byte{0x5a});
    }
  }
}

TEST_P(Kernels, FoldOfManyInputsEqualsTheReference) {
  base::Rng rng(11);
  for (const int num_inputs : {1, 2, 3, 4, 5, 8}) {
    for (const int num_outputs : {1, 2, 3}) {
      for (const double scale : {1.0, 0.5}) {
        constexpr std::uint64_t kCount = 777;
        std::vector<std::vector<float>> in(static_cast<std::size_t>(num_inputs));
        std::vector<std::vector<float>> out(static_cast<std::size_t>(num_outputs),
                                            std::vector<float>(kCount));
        std::vector<const std::byte*> inputs;
        std::vector<std::byte*> outputs;
        for (auto& v : in) {
          for (std::uint64_t i = 0; i < kCount; ++i)
            v.push_back(static_cast<float>(rng.below(100)));
          inputs.push_back(reinterpret_cast<std::byte*>(v.data()));
        }
        for (auto& v : out) outputs.push_back(reinterpret_cast<std::byte*>(v.data()));
        kernels_->fold_block(outputs.data(), num_outputs, inputs.data(), num_inputs, kCount,
                             DType::kFloat32, ReduceOp::kSum, scale);
        for (std::uint64_t i = 0; i < kCount; ++i) {
          double expected = 0;
          for (auto& v : in) expected += static_cast<double>(v[i]);
          for (auto& v : out) ASSERT_EQ(static_cast<double>(v[i]), expected * scale);
        }
      }
    }
  }
}

// 16-bit floats accumulate in float32: 1 + 2^-9 eight times is lost if each step rounds to bf16.
TEST_P(Kernels, SixteenBitFloatsRoundOnce) {
  constexpr int kInputs = 9;
  std::vector<BFloat16> values(kInputs, BFloat16::from_accumulator(1.0f / 512));
  values[0] = BFloat16::from_accumulator(1.0f);
  BFloat16 result{};
  const std::byte* inputs[kInputs];
  for (int i = 0; i < kInputs; ++i)
    inputs[i] = reinterpret_cast<std::byte*>(&values[static_cast<std::size_t>(i)]);
  auto* output = reinterpret_cast<std::byte*>(&result);
  kernels_->fold_block(&output, 1, inputs, kInputs, 1, DType::kBFloat16, ReduceOp::kSum, 1.0);
  EXPECT_EQ(result.to_accumulator(), 1.015625f);
}

TEST_P(Kernels, NaNSurvivesMinAndMaxFromEitherSide) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    float a[2] = {nan, 1.0f}, b[2] = {1.0f, nan}, out[2];
    kernels_->combine(reinterpret_cast<std::byte*>(out), reinterpret_cast<std::byte*>(a),
                      reinterpret_cast<std::byte*>(b), 2, DType::kFloat32, op);
    EXPECT_TRUE(std::isnan(out[0]));
    EXPECT_TRUE(std::isnan(out[1]));
  }
}

INSTANTIATE_TEST_SUITE_P(Sets, Kernels, testing::Values("portable", "avx2", "avx512"));

// All instruction sets must give the same bits, or ranks of different machines disagree.
TEST(Kernels, SetsAgreeToTheLastBitOnRandomFloats) {
  base::Rng rng(3);
  constexpr std::uint64_t kCount = 4099;
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                            DType::kComplex64, DType::kComplex128}) {
    const std::uint64_t bytes = kCount * dtype_bytes(dtype);
    std::vector<std::byte> a(bytes), b(bytes);
    for (auto& byte : a) byte = static_cast<std::byte>(rng.next());
    for (auto& byte : b) byte = static_cast<std::byte>(rng.next());
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kProduct}) {
      std::vector<std::byte> expected(bytes), got(bytes);
      reduce_kernels_named("portable")
          ->combine(expected.data(), a.data(), b.data(), kCount, dtype, op);
      for (const char* name : {"avx2", "avx512"}) {
        const ReduceKernels* kernels = reduce_kernels_named(name);
        if (kernels == nullptr) continue;
        kernels->combine(got.data(), a.data(), b.data(), kCount, dtype, op);
        with_element_type(dtype, [&](auto zero) {
          using T = decltype(zero);
          for (std::uint64_t i = 0; i < kCount; ++i) {
            T x, y;
            std::memcpy(&x, expected.data() + i * sizeof(T), sizeof(T));
            std::memcpy(&y, got.data() + i * sizeof(T), sizeof(T));
            const auto p = number(x), q = number(y);
            const auto same = [](double u, double v) {
              return (std::isnan(u) && std::isnan(v)) || u == v;
            };
            ASSERT_TRUE(same(p.real(), q.real()) && same(p.imag(), q.imag()))
                << name << " " << to_string(dtype) << " " << to_string(op) << " " << i << ": " << p
                << " " << q;
          }
        });
      }
    }
  }
}

// Also of the smallest, and of what is no number: every 16-bit float meets many others, in one pass
// over two to five inputs, into one to three outputs, at every offset into a vector.
TEST(Kernels, SetsAgreeOnEverySixteenBitFloat) {
  base::Rng rng(5);
  constexpr std::uint64_t kCount = 0x10000 + 37;
  const std::uint64_t bytes = kCount * 2;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const int num_inputs : {2, 3, 5}) {
      std::vector<std::vector<std::uint16_t>> in(static_cast<std::size_t>(num_inputs));
      std::vector<const std::byte*> inputs;
      for (auto& values : in) {
        for (std::uint64_t i = 0; i < kCount; ++i) {
          values.push_back(static_cast<std::uint16_t>(inputs.empty() ? i : rng.next()));
        }
        inputs.push_back(reinterpret_cast<std::byte*>(values.data()));
      }
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kProduct}) {
        for (const double scale : {1.0, 0.25}) {
          const auto folded = [&](const char* name) {
            std::vector<std::vector<std::byte>> out(3, std::vector<std::byte>(bytes));
            constexpr std::uint64_t kBlock = kFoldBlockBytes / 2;
            for (std::uint64_t first = 0; first < kCount; first += kBlock) {
              std::vector<const std::byte*> from;
              std::vector<std::byte*> to;
              for (const std::byte* input : inputs) from.push_back(input + 2 * first);
              for (auto& output : out) to.push_back(output.data() + 2 * first);
              reduce_kernels_named(name)->fold_block(to.data(), 3, from.data(), num_inputs,
                                                     std::min(kBlock, kCount - first), dtype, op,
                                                     scale);
            }
            EXPECT_TRUE(out[0] == out[1] && out[0] == out[2]);
            return out[0];
          };
          const auto expected = folded("portable");
          for (const char* name : {"avx2", "avx512"}) {
            if (reduce_kernels_named(name) == nullptr) continue;
            const auto got = folded(name);
            for (std::uint64_t i = 0; i < kCount; ++i) {
              std::uint16_t x, y;
              std::memcpy(&x, expected.data() + 2 * i, 2);
              std::memcpy(&y, got.data() + 2 * i, 2);
              // Whose sign a sum of two NaN has is the processor's to choose.
              const std::uint16_t infinity = dtype == DType::kFloat16 ? 0x7c00 : 0x7f80;
              const bool are_nan = (x & 0x7fff) > infinity && (y & 0x7fff) > infinity;
              ASSERT_TRUE(x == y || are_nan)
                  << name << " " << to_string(dtype) << " " << to_string(op) << " of " << num_inputs
                  << ", scale " << scale << ", element " << i << ": " << x << " " << y;
            }
          }
        }
      }
    }
  }
}

// Every half has an exact float; every float near a half, or between two, rounds to nearest even.
TEST(Half, ConvertsExhaustively) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Half half{static_cast<std::uint16_t>(bits)};
    const float value = half.to_accumulator();
    const std::uint32_t magnitude = bits & 0x7fff;
    if (magnitude > 0x7c00) {
      ASSERT_TRUE(std::isnan(value));
      continue;
    }
    const int exponent = static_cast<int>(magnitude >> 10);
    const double fraction = static_cast<double>(magnitude & 0x3ff);
    double expected =
        exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
    if (magnitude == 0x7c00) expected = std::numeric_limits<double>::infinity();
    ASSERT_EQ(static_cast<double>(std::fabs(value)), expected);
    ASSERT_EQ(std::signbit(value), (bits & 0x8000) != 0);
    ASSERT_EQ(Half::from_accumulator(value).bits, bits);
    if (magnitude >= 0x7bff) continue;
    const Half next{static_cast<std::uint16_t>(bits + 1)};
    const float middle = (value + next.to_accumulator()) / 2;  // exact in float32
    ASSERT_EQ(Half::from_accumulator(middle).bits, magnitude % 2 == 0 ? bits : bits + 1);
    ASSERT_EQ(Half::from_accumulator(std::nextafter(middle, value)).bits, bits);
    ASSERT_EQ(Half::from_accumulator(std::nextafter(middle, next.to_accumulator())).bits, bits + 1);
  }
  EXPECT_EQ(Half::from_accumulator(65519.0f).bits, 0x7bff);
  EXPECT_EQ(Half::from_accumulator(65520.0f).bits, 0x7c00);
  EXPECT_EQ(Half::from_accumulator(1e30f).bits, 0x7c00);
}

TEST(BFloat16, RoundsToNearestEven) {
  for (std::uint32_t bits = 0; bits < 0x7f80; ++bits) {
    const BFloat16 low{static_cast<std::uint16_t>(bits)};
    ASSERT_EQ(BFloat16::from_accumulator(low.to_accumulator()).bits, bits);
    const float middle = bits_to_float((bits << 16) | 0x8000);
    ASSERT_EQ(BFloat16::from_accumulator(middle).bits, bits % 2 == 0 ? bits : bits + 1);
  }
  EXPECT_TRUE(std::isnan(BFloat16::from_accumulator(std::nanf("")).to_accumulator()));
}

// The CUDA kernels' bodies, run for every thread of a launch, against the CPU kernels.
TEST(CudaTwin, StridedBodiesCoverEveryElementOnce) {
  for (const std::uint64_t count : {0u, 1u, 255u, 256u, 1000u}) {
    for (const std::uint64_t threads : {1u, 256u, 512u}) {
      std::vector<Half> a, b;
      for (std::uint64_t i = 0; i < count; ++i) {
        a.push_back(Half::from_accumulator(static_cast<float>(i % 7)));
        b.push_back(Half::from_accumulator(static_cast<float>(i % 5)));
      }
      std::vector<Half> out(count), expected(count), scaled = a;
      for (std::uint64_t t = 0; t < threads; ++t) {
        combine_strided(out.data(), a.data(), b.data(), count, SumOp(), t, threads);
        scale_strided(scaled.data(), count, 0.5, t, threads);
      }
      reduce_kernels().combine(
          reinterpret_cast<std::byte*>(expected.data()), reinterpret_cast<std::byte*>(a.data()),
          reinterpret_cast<std::byte*>(b.data()), count, DType::kFloat16, ReduceOp::kSum);
      for (std::uint64_t i = 0; i < count; ++i) {
        ASSERT_EQ(out[i].bits, expected[i].bits);
        ASSERT_EQ(scaled[i].to_accumulator(), a[i].to_accumulator() / 2);
      }
    }
  }
}

// The one-pass fold of the device against the CPU's, to the bit, for every type and reduction.
TEST(CudaTwin, FoldsAsTheCpuDoes) {
  base::Rng rng(17);
  constexpr std::uint64_t kCount = 333;
  for (int d = 0; d < kNumDTypes; ++d) {
    const auto dtype = static_cast<DType>(d);
    with_element_type(dtype, [&](auto zero) {
      using T = decltype(zero);
      for (const ReduceOp op : kOps) {
        if (!is_reducible(dtype, op)) continue;
        const double scale = op == ReduceOp::kAvg ? 0.25 : 1.0;
        std::vector<std::vector<T>> in(4);
        FoldInputs<T> inputs{};
        std::vector<const std::byte*> bytes;
        for (auto& values : in) {
          for (std::uint64_t i = 0; i < kCount; ++i) values.push_back(element<T>(rng.next()));
          inputs.data[inputs.count++] = values.data();
          bytes.push_back(reinterpret_cast<std::byte*>(values.data()));
        }
        std::vector<T> out(kCount), expected(kCount);
        with_reduce_op<T>(op, [&](auto functor) {
          for (std::uint64_t t = 0; t < 64; ++t) {
            fold_strided(out.data(), inputs, kCount, functor, scale, t, 64);
          }
        });
        auto* target = reinterpret_cast<std::byte*>(expected.data());
        reduce_kernels().fold_block(&target, 1, bytes.data(), 4, kCount, dtype, op, scale);
        ASSERT_EQ(std::memcmp(out.data(), expected.data(), kCount * sizeof(T)), 0)
            << to_string(dtype) << " " << to_string(op);
      }
    });
  }
}

}  // namespace
}  // namespace pycomm::kernels
