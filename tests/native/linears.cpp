// Linears over memory of exactly their size: what is read or written beyond it, the sanitizers see. Every result is
// compared with double precision, so that nothing is optimized away.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "linear.h"

using namespace linear;

namespace {

std::mt19937 generator(7);

double normal() {
  return std::normal_distribution<double>()(generator);
}
int whole(int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(generator);
}

/// Memory aligned to 64, with nothing of its own behind its last byte.
struct Bytes {
  explicit Bytes(size_t size) : data((uint8_t*)aligned_alloc(64, (size + 63) / 64 * 64), free) {}
  std::unique_ptr<uint8_t, decltype(&free)> data;
};

/// A layer with random weights, and what they stand for.
struct Layer {
  Linear linear{};
  std::vector<uint8_t> panels, zeros;
  std::vector<float> scales, bias;
  std::vector<bf16_t> half_scales;
  std::vector<double> values;  // (rows, ins)
  int rows;

  Layer(Format format, int outs, int ins, int group, bool gated, bool has_zeros, bool has_bias) : rows(gated ? 2 * outs : outs) {
    linear.format = format;
    linear.gated = gated;
    linear.outs = outs;
    linear.ins = ins;
    linear.group = group;
    const int64_t num_panels = (outs + PANEL - 1) / PANEL * (gated ? 2 : 1), groups = num_groups(linear);
    panels.assign((size_t)(num_panels * panel_bytes(linear)), format == Format::INT8 ? 128 : 0);
    scales.assign((size_t)(num_panels * PANEL), 0.0f);
    half_scales.assign((size_t)(num_panels * groups * PANEL), 0);
    if (has_zeros) zeros.assign(half_scales.size(), 0);
    if (has_bias) bias.resize((size_t)rows);
    for (float& number : bias) number = (float)normal();
    values.resize((size_t)(rows * ins));
    for (int row = 0; row < rows; row++) fill(row, row >= outs ? row - outs : row, row >= outs ? 1 : 0);
    linear.panels = panels.data();
    linear.scales = format == Format::INT8 ? (const void*)scales.data() : half_scales.data();
    linear.zeros = has_zeros ? zeros.data() : nullptr;
    linear.bias = has_bias ? bias.data() : nullptr;
  }

  void fill(int row, int out, int half) {
    const int64_t panel = linear.gated ? out / PANEL * 2 + half : out / PANEL, lane = out % PANEL;
    const int64_t groups = num_groups(linear);
    uint8_t* words = panels.data() + panel * panel_bytes(linear) + 4 * lane;
    const float scale = isa::to_float(isa::to_bf16(0.01f + 0.001f * (float)whole(0, 9)));
    scales[(size_t)(panel * PANEL + lane)] = scale;
    for (int64_t g = 0; g < groups; g++) {
      const size_t at = (size_t)((panel * groups + g) * PANEL + lane);
      half_scales[at] = isa::to_bf16(scale);
      if (!zeros.empty()) zeros[at] = (uint8_t)whole(0, 15);
    }
    for (int64_t c = 0; c < linear.ins; c++) {
      double& value = values[(size_t)(row * linear.ins + c)];
      if (linear.format == Format::FP32) {
        const float number = (float)normal();
        memcpy(words + c * STEP_BYTES, &number, 4);
        value = number;
      } else if (linear.format == Format::BF16) {
        const bf16_t number = isa::to_bf16((float)normal());
        memcpy(words + c / 2 * STEP_BYTES + c % 2 * 2, &number, 2);
        value = isa::to_float(number);
      } else if (linear.format == Format::INT8) {
        const int number = whole(-127, 127);
        words[c / 4 * STEP_BYTES + c % 4] = (uint8_t)(number + 128);
        value = number * (double)scale;
      } else {
        const int number = whole(0, 15);
        words[c / 8 * STEP_BYTES + c % 4] |= (uint8_t)(number << (c % 8 / 4 * 4));
        const int zero = zeros.empty() ? 8 : zeros[(size_t)((panel * groups + c / linear.group) * PANEL + lane)];
        value = (number - zero) * (double)scale;
      }
    }
  }
};

template <class T>
T number_of(double value);
template <>
float number_of<float>(double value) {
  return (float)value;
}
template <>
bf16_t number_of<bf16_t>(double value) {
  return isa::to_bf16((float)value);
}
double value_of(float number) {
  return number;
}
double value_of(bf16_t number) {
  return isa::to_float(number);
}

template <class T>
bool check(const Layer& layer, int num_rows, int num_threads) {
  const Linear& linear = layer.linear;
  std::vector<T> x((size_t)(num_rows * linear.ins)), out((size_t)(num_rows * linear.outs));
  for (T& number : x) number = number_of<T>(normal());
  Bytes scratch((size_t)activation_bytes(linear, num_rows));
  const Activations rows = lay_out(linear, scratch.data.get(), num_rows);
  const Output output{out.data(), linear.outs, sizeof(T) == 2, 0, Activation::NONE, 1.0f};
  for (int thread = 0; thread < num_threads; thread++) {
    prepare_part(linear, rows, x.data(), linear.ins, num_rows, thread, num_threads);
  }
  for (int thread = 0; thread < num_threads; thread++) linear_part(linear, rows, num_rows, output, thread, num_threads);
  for (int r = 0; r < num_rows; r++) {
    for (int n = 0; n < linear.outs; n++) {
      double products[2] = {0, 0}, magnitude = 1;
      for (int half = 0; half < (linear.gated ? 2 : 1); half++) {
        const int row = n + half * (int)linear.outs;
        products[half] = layer.bias.empty() ? 0 : layer.bias[(size_t)row];
        for (int c = 0; c < linear.ins; c++) {
          products[half] += value_of(x[(size_t)(r * linear.ins + c)]) * layer.values[(size_t)(row * linear.ins + c)];
        }
        magnitude *= 1 + std::abs(products[half]) + std::sqrt((double)linear.ins) * 1.5;
      }
      const double right = linear.gated ? products[0] * products[1] : products[0];
      const double found = value_of(out[(size_t)(r * linear.outs + n)]);
      // Of int8 activations a group's rounding shows; of bf16 the output's.
      const double bound = magnitude * (linear.format == Format::FP32 && sizeof(T) == 4 ? 1e-5 : 0.05);
      if (!(std::abs(found - right) <= bound)) {
        printf("format %d, %d x %d, row %d of %d, output %d: %g, not %g\n", (int)linear.format, (int)linear.outs,
               (int)linear.ins, r, num_rows, n, found, right);
        return false;
      }
    }
  }
  return true;
}

}  // namespace

int main() {
  int count = 0;
  for (int round = 0; round < 30; round++) {
    for (Format format : {Format::FP32, Format::BF16, Format::INT8, Format::INT4}) {
      const int group = format == Format::INT4 ? 32 << whole(0, 1) : 64;
      const Layer layer(format, whole(1, 110), whole(1, 150), group, round % 2, format == Format::INT4 && round % 3 == 0,
                        round % 4 == 0);
      const int num_rows = whole(1, 30), num_threads = whole(1, 4);
      if (!check<float>(layer, num_rows, num_threads) || !check<bf16_t>(layer, num_rows, num_threads)) return 1;
      count += 2;
    }
  }
  printf("%d layers\n", count);
  return 0;
}
