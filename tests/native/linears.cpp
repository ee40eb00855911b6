// Linears over memory of exactly their size: what is read or written beyond it, the sanitizers see. Every result is
// compared with double precision, so that nothing is optimized away.
#include <algorithm>
#include <cmath>
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
bool coin() {
  return whole(0, 1) == 1;
}

/// Memory aligned to 64, with nothing of its own behind its last byte.
struct Bytes {
  explicit Bytes(size_t size) : data((uint8_t*)aligned_alloc(64, (size + 63) / 64 * 64), free) {}
  std::unique_ptr<uint8_t, decltype(&free)> data;
};

/// What a layer is made of, but for its numbers.
struct Kind {
  Format format;
  Numbers activations, scale_type, min_type;
  int group, groups_a_scale;
  bool has_zeros, has_mins, gated, has_bias, has_input_scale, rotated;
};

/// A layer with random weights, and what they stand for.
struct Layer {
  Kind kind;
  Linear linear{};
  std::vector<uint8_t> panels, zeros, scales, mins;
  std::vector<float> bias, input_scale;
  std::vector<double> values;  // (rows, ins)
  int rows;

  Layer(const Kind& of, int outs, int ins) : kind(of), rows(of.gated ? 2 * outs : outs) {
    linear.format = kind.format;
    linear.gated = kind.gated;
    linear.activations = kind.activations;
    linear.rotated = kind.rotated;
    linear.scale_type = kind.scale_type;
    linear.min_type = kind.min_type;
    linear.outs = outs;
    linear.ins = ins;
    linear.group = kind.group;
    linear.groups_a_scale = kind.groups_a_scale;
    const int64_t num_panels = (outs + PANEL - 1) / PANEL * (kind.gated ? 2 : 1);
    const size_t num_scales = (size_t)(num_panels * std::max<int64_t>(1, scales_a_row(linear)) * PANEL);
    const bool is_integer = linear::is_integer(kind.format);
    panels.assign((size_t)(num_panels * panel_bytes(linear)), 0);
    if (is_integer) scales.assign(num_scales * (kind.scale_type == Numbers::FP32 ? 4 : 2), 0);
    if (kind.has_zeros) zeros.assign(num_scales, 0);
    if (kind.has_mins) mins.assign(num_scales * (kind.min_type == Numbers::FP32 ? 4 : 2), 0);
    if (kind.has_bias) bias.resize((size_t)rows);
    for (float& number : bias) number = (float)normal();
    if (kind.has_input_scale) input_scale.resize((size_t)ins);
    for (float& number : input_scale) number = 0.5f + 0.1f * (float)whole(0, 9);
    linear.panels = panels.data();
    linear.scales = is_integer ? scales.data() : nullptr;
    linear.zeros = kind.has_zeros ? zeros.data() : nullptr;
    linear.mins = kind.has_mins ? mins.data() : nullptr;
    linear.bias = kind.has_bias ? bias.data() : nullptr;
    linear.input_scale = kind.has_input_scale ? input_scale.data() : nullptr;
    values.resize((size_t)(rows * ins));
    for (int row = 0; row < rows; row++) fill(row, row >= outs ? row - outs : row, row >= outs ? 1 : 0);
  }

  /// A random number of a type, multiples of 2**-9 that all types hold, written and returned.
  static double write(std::vector<uint8_t>& to, size_t at, Numbers type) {
    const int eighths = whole(1, 7);
    const float value = (float)eighths / 512;
    if (type == Numbers::FP32) {
      memcpy(to.data() + 4 * at, &value, 4);
    } else if (type == Numbers::BF16) {
      const bf16_t half = isa::to_bf16(value);
      memcpy(to.data() + 2 * at, &half, 2);
    } else {
      const int exponent = std::ilogb(value);
      const uint16_t half = (uint16_t)((exponent + 15) << 10 | (int)(std::ldexp(value, 10 - exponent)) % 1024);
      memcpy(to.data() + 2 * at, &half, 2);
    }
    return value;
  }

  void fill(int row, int out, int half) {
    const int64_t panel = linear.gated ? out / PANEL * 2 + half : out / PANEL, lane = out % PANEL;
    uint8_t* words = panels.data() + panel * panel_bytes(linear) + 4 * lane;
    std::vector<double> scale(1, 1.0), zero, least;
    if (is_integer(linear.format)) {
      const int64_t count = std::max<int64_t>(1, scales_a_row(linear));
      scale.resize((size_t)count);
      for (int64_t g = 0; g < count; g++) {
        const size_t at = (size_t)((panel * count + g) * PANEL + lane);
        scale[(size_t)g] = write(scales, at, kind.scale_type);
        if (kind.has_zeros) zeros[at] = (uint8_t)whole(0, 15);
        zero.push_back(kind.has_zeros ? zeros[at] : kind.format == Format::INT4 && !kind.has_mins ? 8 : 0);
        least.push_back(kind.has_mins ? write(mins, at, kind.min_type) : 0);
      }
    }
    for (int64_t c = 0; c < linear.ins; c++) {
      double& value = values[(size_t)(row * linear.ins + c)];
      const size_t g = linear.groups_a_scale > 0 ? (size_t)(c / (linear.group * linear.groups_a_scale)) : 0;
      if (linear.format == Format::FP32) {
        const float number = (float)normal();
        memcpy(words + c * STEP_BYTES, &number, 4);
        value = number;
      } else if (linear.format == Format::BF16) {
        const bf16_t number = isa::to_bf16((float)normal());
        memcpy(words + c / 2 * STEP_BYTES + c % 2 * 2, &number, 2);
        value = isa::to_float(number);
      } else if (linear.format == Format::INT8) {
        const int number = whole(-128, 127);
        words[c / 4 * STEP_BYTES + c % 4] = (uint8_t)(number + 128);
        value = number * scale[g] + least[g];
      } else {
        const int number = whole(0, 15), column = (int)(c % 8);
        const bool has_int_rows = kind.activations == Numbers::INT8;
        const int bit = has_int_rows ? column % 4 * 8 + column / 4 * 4 : column % 2 * 16 + column / 2 * 4;
        words[c / 8 * STEP_BYTES + bit / 8] |= (uint8_t)(number << bit % 8);
        value = (number - zero[g]) * scale[g] + least[g];
      }
    }
  }
};

Numbers number_type() {
  return (Numbers)whole(0, 2);
}
/// A random kind of a format: integers with int8 rows or float ones, with scales of any type, a row or a group.
Kind kind_of(Format format) {
  Kind kind{format, Numbers::FP32, Numbers::FP32, Numbers::FP32, 0, 0, false, false, false, whole(0, 3) == 0, false, false};
  kind.gated = whole(0, 1) == 1;
  if (format == Format::BF16) kind.activations = Numbers::BF16;
  if (!is_integer(format)) return kind;
  kind.activations = std::vector<Numbers>{Numbers::FP32, Numbers::BF16, Numbers::INT8}[(size_t)whole(0, 2)];
  kind.has_input_scale = whole(0, 1) == 1;
  const bool has_int_rows = kind.activations == Numbers::INT8;
  kind.rotated = has_int_rows && coin();
  if (format == Format::INT8 && whole(0, 1) == 1) {
    kind.group = has_int_rows ? 64 : 0;
    return kind;
  }
  const int group = 16 << whole(0, 3), offset = whole(0, 2);
  kind.group = has_int_rows ? std::min(64, group) : group;
  kind.groups_a_scale = group / kind.group;
  kind.scale_type = number_type();
  kind.min_type = number_type();
  kind.has_mins = offset == 1;
  kind.has_zeros = offset == 2 && format == Format::INT4;
  return kind;
}

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

/// One row as the layer's weights meet it.
template <class T>
std::vector<double> row_of(const Layer& layer, const T* x) {
  std::vector<double> row((size_t)layer.linear.ins);
  for (size_t c = 0; c < row.size(); c++) row[c] = value_of(x[c]) * (layer.input_scale.empty() ? 1 : layer.input_scale[c]);
  if (!layer.kind.rotated) return row;
  std::vector<double> rotated = row;
  for (size_t begin = 0; begin + 64 <= row.size(); begin += 64) {
    for (size_t i = 0; i < 64; i++) {
      double sum = 0;
      for (size_t j = 0; j < 64; j++) sum += row[begin + j] * (__builtin_parityll(i & j) ? -1 : 1);
      rotated[begin + i] = sum / 8;
    }
  }
  return rotated;
}

template <class T>
bool check(const Layer& layer, int num_rows, int num_threads) {
  const Linear& linear = layer.linear;
  std::vector<T> x((size_t)(num_rows * linear.ins)), out((size_t)(num_rows * linear.outs));
  for (T& number : x) number = number_of<T>(normal());
  // One row that shows what it holds, and harms no other.
  const int bad_row = whole(0, 2) == 0 ? whole(0, num_rows - 1) : -1;
  if (bad_row >= 0) {
    x[(size_t)(bad_row * linear.ins + whole(0, (int)linear.ins - 1))] = number_of<T>(coin() ? NAN : INFINITY);
  }
  Bytes scratch((size_t)activation_bytes(linear, num_rows));
  const Activations rows = lay_out(linear, scratch.data.get(), num_rows);
  const Output output{out.data(), linear.outs, sizeof(T) == 2, 0, Activation::NONE, 1.0f};
  for (int thread = 0; thread < num_threads; thread++) {
    prepare_part(linear, rows, x.data(), linear.ins, num_rows, thread, num_threads);
  }
  for (int thread = 0; thread < num_threads; thread++) linear_part(linear, rows, num_rows, output, thread, num_threads);
  for (int r = 0; r < num_rows; r++) {
    const std::vector<double> met = row_of(layer, x.data() + r * linear.ins);
    for (int n = 0; n < linear.outs; n++) {
      double products[2] = {0, 0}, magnitude = 1;
      for (int half = 0; half < (linear.gated ? 2 : 1); half++) {
        const int row = n + half * (int)linear.outs;
        products[half] = layer.bias.empty() ? 0 : layer.bias[(size_t)row];
        for (int c = 0; c < linear.ins; c++) {
          products[half] += met[(size_t)c] * layer.values[(size_t)(row * linear.ins + c)];
        }
        magnitude *= 1 + std::abs(products[half]) + std::sqrt((double)linear.ins) * 1.5;
      }
      const double right = linear.gated ? products[0] * products[1] : products[0];
      const double found = value_of(out[(size_t)(r * linear.outs + n)]);
      if (r == bad_row) {
        if (!std::isfinite(found)) continue;
        printf("format %d, row %d: %g of a number that is none\n", (int)linear.format, r, found);
        return false;
      }
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
    for (Format format : {Format::FP32, Format::BF16, Format::INT8, Format::INT4, Format::INT8, Format::INT4}) {
      // Few columns of most, and now and then enough for several chunks.
      const Layer layer(kind_of(format), whole(1, 110), whole(1, round % 10 == 0 ? 700 : 150));
      const int num_rows = whole(1, 30), num_threads = whole(1, 4);
      if (!check<float>(layer, num_rows, num_threads) || !check<bf16_t>(layer, num_rows, num_threads)) return 1;
      count += 2;
    }
  }
  printf("%d layers\n", count);
  return 0;
}
