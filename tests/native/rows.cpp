// The row ops over memory of exactly their size: what is read or written beyond it, the sanitizers see. Every number is
// compared with double precision.
#include <cstdio>
#include <random>
#include <vector>

#include "rows.h"

namespace {

std::mt19937 generator(7);
int failures = 0;

int whole(int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(generator);
}
std::vector<float> normal(size_t count) {
  std::vector<float> numbers(count);
  for (float& number : numbers) number = std::normal_distribution<float>()(generator);
  return numbers;
}
std::vector<bf16_t> narrowed(const std::vector<float>& numbers) {
  std::vector<bf16_t> halves;
  for (float number : numbers) halves.push_back(isa::to_bf16(number));
  return halves;
}
template <class Args, class Part>
void in_threads(Part&& part, const Args& args) {
  const int num_threads = whole(1, 4);
  for (int thread = 0; thread < num_threads; thread++) part(args, thread, num_threads);
}
void expect(const char* op, double found, double right, double bound) {
  if (std::abs(found - right) <= bound) return;
  std::printf("%s: %g, not %g\n", op, found, right);
  failures++;
}

void norms() {
  const int num_rows = whole(1, 4), width = whole(1, 100), centred = whole(0, 1);
  const auto x = normal(num_rows * width), weight = normal(width), bias = normal(width);
  std::vector<float> out(x.size()), total(x.size());
  in_threads(norm_part, NormArgs{x.data(), weight.data(), bias.data(), out.data(), num_rows, 1, width, width, width, 1e-5f, 0, 0, centred});
  for (int row = 0; row < num_rows; row++) {
    double mean = 0, square = 0;
    for (int i = 0; i < width; i++) mean += centred ? x[row * width + i] / (double)width : 0;
    for (int i = 0; i < width; i++) square += std::pow(x[row * width + i] - mean, 2) / width;
    for (int i = 0; i < width; i++) {
      const double right = (x[row * width + i] - mean) / std::sqrt(square + 1e-5) * weight[i] + (centred ? bias[i] : 0);
      expect("norm", out[row * width + i], right, 1e-4);
    }
  }
  const auto halves = narrowed(x);
  std::vector<bf16_t> half_out(x.size()), half_total(x.size());
  in_threads(add_norm_part, AddNormArgs{halves.data(), halves.data(), weight.data(), half_out.data(), half_total.data(), num_rows, width, width, width, 1e-5f, 1, 0});
  for (size_t i = 0; i < x.size(); i++) expect("add", isa::to_float(half_total[i]), 2 * isa::to_float(halves[i]), 0);
}

void rotation() {
  const int tokens = whole(1, 3), heads = whole(1, 3), half = whole(0, 40), dim = 2 * half + whole(1, 5);
  const auto x = normal(tokens * heads * dim), cos = normal(tokens * half), sin = normal(tokens * half);
  std::vector<float> out(x.size());
  in_threads(rope_part, RopeArgs{x.data(), cos.data(), sin.data(), out.data(), tokens, heads, heads * dim, dim, dim, half, 0, 0});
  for (int i = 0; i < tokens * heads; i++) {
    for (int d = 0; d < half; d++) {
      const double a = x[i * dim + d], b = x[i * dim + half + d];
      const double c = cos[i / heads * half + d], s = sin[i / heads * half + d];
      expect("rope", out[i * dim + d], a * c - b * s, 1e-5);
      expect("rope", out[i * dim + half + d], b * c + a * s, 1e-5);
    }
    for (int d = 2 * half; d < dim; d++) expect("rope", out[i * dim + d], x[i * dim + d], 0);
  }
}

void activations() {
  const int num_rows = whole(1, 3), width = whole(1, 2500);
  const auto x = normal(num_rows * width * 2);
  std::vector<float> out(num_rows * width);
  in_threads(activate_part, ActivateArgs{x.data(), out.data(), num_rows, 2 * width, width, Activation::SILU, 1, 1, 0});
  for (size_t i = 0; i < out.size(); i++) {
    const double gate = x[i / width * 2 * width + i % width], up = x[i / width * 2 * width + width + i % width];
    expect("silu", out[i], gate / (1 + std::exp(-gate)) * up, 1e-5);
  }
  in_threads(activate_part, ActivateArgs{x.data(), out.data(), num_rows, 2 * width, width, Activation::SOFT_CAP, 2, 0, 0});
  for (size_t i = 0; i < out.size(); i++) expect("cap", out[i], 2 * std::tanh(x[i / width * 2 * width + i % width] / 2.0), 1e-5);
  in_threads(activate_part, ActivateArgs{x.data(), out.data(), num_rows, 2 * width, width, Activation::GELU_TANH, 1, 0, 0});
  for (size_t i = 0; i < out.size(); i++) {
    const double v = x[i / width * 2 * width + i % width];
    expect("gelu", out[i], 0.5 * v * (1 + std::tanh(std::sqrt(2 / M_PI) * (v + 0.044715 * v * v * v))), 1e-5);
  }
}

void lookups() {
  const int vocab = whole(1, 20), width = whole(1, 70), tokens = whole(1, 9);
  const auto table = normal(vocab * width);
  const auto halves = narrowed(table);
  std::vector<int64_t> ids, best(vocab);
  for (int i = 0; i < tokens; i++) ids.push_back(whole(0, vocab - 1));
  std::vector<float> out(tokens * width);
  in_threads(embedding_part, EmbeddingArgs{ids.data(), halves.data(), out.data(), tokens, vocab, width, 1, 0});
  for (size_t i = 0; i < out.size(); i++) expect("embedding", out[i], isa::to_float(halves[ids[i / width] * width + i % width]), 0);
  in_threads(argmax_part, ArgmaxArgs{table.data(), best.data(), vocab, width, width});
  for (int row = 0; row < vocab; row++) {
    const float* numbers = table.data() + row * width;
    expect("argmax", (double)best[row], (double)(std::max_element(numbers, numbers + width) - numbers), 0);
  }
}

void cache() {
  const int pages = whole(1, 4), page_size = whole(1, 5), heads = whole(1, 3), dim = whole(1, 70);
  const int slots = pages * page_size;
  const auto keys = normal(slots * heads * dim), values = normal(slots * heads * dim);
  std::vector<int64_t> order;
  for (int slot = 0; slot < slots; slot++) order.push_back(whole(0, 3) ? slot : -1);
  std::shuffle(order.begin(), order.end(), generator);
  const int64_t head = 2 * page_size * dim;
  std::vector<bf16_t> stored(pages * heads * head, 1);
  CacheWriteArgs args{keys.data(), values.data(), stored.data(), stored.data() + page_size * dim, nullptr, nullptr, order.data(), heads * dim, dim, heads * dim, dim, heads * head, head, dim, 0, 0, 0, slots, heads, dim, page_size, 0, entries::BF16};
  in_threads(cache_write_part, args);
  std::vector<int8_t> numbers(stored.size(), 77);
  std::vector<float> key_scales(slots * heads, NAN), value_scales(slots * heads, NAN);
  args.key_pages = numbers.data();
  args.value_pages = numbers.data() + page_size * dim;
  args.key_scales = key_scales.data();
  args.value_scales = value_scales.data();
  args.scale_page_stride = page_size * heads;
  args.scale_head_stride = page_size;
  args.scale_slot_stride = 1;
  args.entry = entries::INT8;
  in_threads(cache_write_part, args);
  for (int token = 0; token < slots; token++) {
    if (order[token] < 0) continue;
    for (int h = 0; h < heads; h++) {
      const int64_t place = order[token] / page_size * heads * head + h * head + order[token] % page_size * dim;
      const int64_t scale = (order[token] / page_size * heads + h) * page_size + order[token] % page_size;
      for (int d = 0; d < dim; d++) {
        const size_t i = ((size_t)token * heads + h) * dim + d;
        expect("keys", stored[place + d], isa::to_bf16(keys[i]), 0);
        expect("values", stored[place + page_size * dim + d], isa::to_bf16(values[i]), 0);
        expect("int8 keys", numbers[place + d] * (double)key_scales[scale], keys[i], 0.501 * key_scales[scale]);
        expect("int8 values", numbers[place + page_size * dim + d] * (double)value_scales[scale], values[i],
               0.501 * value_scales[scale]);
      }
    }
  }
}

}  // namespace

int main() {
  for (int round = 0; round < 100; round++) {
    norms();
    rotation();
    activations();
    lookups();
    cache();
  }
  return failures != 0;
}
