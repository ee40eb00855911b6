// 2:4 sparse linears over memory of exactly their size: what is read or written beyond it, the sanitizers see. Every result
// is compared with double precision.
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

/// A layer with random weights, two of every four columns, and what they stand for.
struct Layer {
  Linear linear{};
  std::vector<uint8_t> panels;
  std::vector<float> scales;
  std::vector<double> values;  // (outs, ins)

  Layer(Format format, int outs, int ins) {
    linear.format = format;
    linear.sparse = 1;
    linear.activations = format == Format::INT8 ? Numbers::INT8 : format == Format::BF16 ? Numbers::BF16 : Numbers::FP32;
    linear.outs = outs;
    linear.ins = ins;
    linear.group = format == Format::INT8 ? 64 : 0;
    const int64_t num_panels = (outs + PANEL - 1) / PANEL;
    panels.assign((size_t)(num_panels * panel_bytes(linear)), 0);
    scales.assign((size_t)(num_panels * PANEL), 0.0f);
    values.resize((size_t)(outs * ins));
    for (int64_t out = 0; out < num_panels * PANEL; out++) {
      scales[(size_t)out] = 0.01f + 0.001f * (float)whole(0, 9);
      for (int64_t group = 0; group < (ins + 3) / 4; group++) fill(out, group);
    }
    linear.panels = panels.data();
    linear.scales = format == Format::INT8 ? scales.data() : nullptr;
  }

  void fill(int64_t out, int64_t group) {
    const int64_t lane = out % PANEL;
    uint8_t* step = panels.data() + out / PANEL * panel_bytes(linear) + group * step_bytes(words_of(linear));
    uint8_t* masks = step + step_bytes(words_of(linear)) - sparse::MASK_BYTES;
    const int first = whole(0, 2), second = whole(first + 1, 3);
    if (linear.format != Format::INT8 && lane == 0) memset(masks, 255, sparse::MASK_BYTES);
    for (int which = 0; which < 2; which++) {
      const int column = which == 0 ? first : second;
      const int64_t at = 4 * group + column;
      const bool is_there = out < linear.outs && at < linear.ins;
      double value = 0;
      if (linear.format == Format::INT8) {
        const int number = is_there ? whole(-127, 127) : 0;
        step[2 * lane + which] = (uint8_t)number;
        masks[lane / 2] |= (uint8_t)(1 << (column + lane % 2 * 4));
        value = number * (double)scales[(size_t)out];
      } else {
        const float number = is_there ? isa::to_float(isa::to_bf16((float)normal())) : 0.0f;
        if (linear.format == Format::BF16) {
          const bf16_t half = isa::to_bf16(number);
          memcpy(step + 4 * lane + 2 * which, &half, 2);
        } else {
          memcpy(step + 4 * (PANEL * which + lane), &number, 4);
        }
        masks[lane / 16 * 8 + 2 * column + lane % 16 / 8] &= (uint8_t) ~(1 << lane % 8);
        value = number;
      }
      if (is_there) values[(size_t)(out * linear.ins + at)] = value;
    }
  }
};

bool check(const Layer& layer, int num_rows) {
  const Linear& linear = layer.linear;
  std::vector<float> x((size_t)(num_rows * linear.ins)), out((size_t)(num_rows * linear.outs));
  for (float& number : x) number = isa::to_float(isa::to_bf16((float)normal()));
  const size_t size = ((size_t)activation_bytes(linear, num_rows) + 63) / 64 * 64;
  const std::unique_ptr<void, decltype(&free)> scratch(aligned_alloc(64, size), free);
  const Activations rows = lay_out(linear, scratch.get(), num_rows);
  prepare_part(linear, rows, x.data(), linear.ins, num_rows, 0, 1);
  linear_part(linear, rows, num_rows, {out.data(), linear.outs, 0, 0, Activation::NONE, 1.0f}, 0, 1);
  for (int r = 0; r < num_rows; r++) {
    for (int64_t n = 0; n < linear.outs; n++) {
      double right = 0, magnitude = 0;
      for (int64_t c = 0; c < linear.ins; c++) {
        const double product = x[(size_t)(r * linear.ins + c)] * layer.values[(size_t)(n * linear.ins + c)];
        right += product;
        magnitude += std::abs(product);
      }
      const double found = out[(size_t)(r * linear.outs + n)];
      if (!(std::abs(found - right) <= magnitude * (linear.format == Format::INT8 ? 0.03 : 1e-5) + 1e-6)) {
        printf("format %d, %d x %d, row %d of %d, output %d: %g, not %g\n", (int)linear.format, (int)linear.outs,
               (int)linear.ins, r, num_rows, (int)n, found, right);
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
    for (Format format : {Format::FP32, Format::BF16, Format::INT8}) {
      if (!check(Layer(format, whole(1, 110), whole(1, 600)), whole(1, 20))) return 1;
      count++;
    }
  }
  printf("%d layers\n", count);
  return 0;
}
