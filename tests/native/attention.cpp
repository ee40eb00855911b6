// Attention over memory of exactly its size: what is read or written beyond it, the sanitizers see. Slots that no query
// sees hold NaN. Every result is compared with double precision.
#include <cstdio>
#include <limits>
#include <random>
#include <vector>

#include "attention.h"

namespace {

std::mt19937 generator(7);

float normal() {
  return std::normal_distribution<float>()(generator);
}
int whole(int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(generator);
}

/// Numbers of either type, in one piece of memory.
template <class Number>
struct Numbers {
  std::vector<Number> data;
  explicit Numbers(size_t count) : data(count, as(std::numeric_limits<float>::quiet_NaN())) {}

  /// int8 numbers that nothing was written to are 99, with a scale of NaN.
  static Number as(float value) {
    if constexpr (sizeof(Number) == 1) return std::isnan(value) ? 99 : (int8_t)std::max(-127.0f, std::min(127.0f, 60 * value));
    else if constexpr (sizeof(Number) == 2) return isa::to_bf16(value);
    else return value;
  }
  double at(size_t i) const {
    if constexpr (sizeof(Number) == 2) return isa::to_float(data[i]);
    else return data[i];
  }
};
constexpr int32_t entry_of(size_t bytes) {
  return bytes == 1 ? entries::INT8 : bytes == 2 ? entries::BF16 : entries::FLOAT32;
}

template <class Query, class Entry>
int check() {
  const int kv_heads = whole(1, 3), group = whole(1, 7), heads = kv_heads * group, dim = whole(1, 256);
  const int page_size = whole(1, 70), window = whole(0, 1) ? whole(1, 150) : 0, num_rows = whole(1, 3);
  std::vector<int32_t> bounds{0}, starts, pages, page_bounds{0};
  for (int row = 0; row < num_rows; row++) {
    const int start = whole(0, 140), length = whole(0, 90);
    starts.push_back(start);
    bounds.push_back(bounds.back() + length);
    for (int page = 0; page < (start + length + page_size - 1) / page_size; page++) pages.push_back((int)pages.size());
    page_bounds.push_back((int)pages.size());
  }
  std::shuffle(pages.begin(), pages.end(), generator);
  for (int row = 1; row < num_rows; row++) {  // which begins in the pages of the row before, or in its own
    const int most = std::min(starts[row - 1] + bounds[row] - bounds[row - 1], starts[row]) / page_size;
    std::copy_n(pages.begin() + page_bounds[row - 1], whole(0, most), pages.begin() + page_bounds[row]);
  }
  const int64_t slot = dim, head = 2 * page_size * slot, page = kv_heads * head;
  Numbers<Entry> cache(pages.size() * page);
  // Scales of keys, and behind them those of values, a page and head at a time.
  std::vector<float> scales(sizeof(Entry) == 1 ? pages.size() * kv_heads * 2 * page_size : 0, NAN);
  Numbers<Query> queries((size_t)bounds.back() * heads * dim), out(queries.data.size());
  for (Query& number : queries.data) number = Numbers<Query>::as(normal());
  const auto offset = [&](int row, int position, int kv_head) {
    return pages[page_bounds[row] + position / page_size] * page + kv_head * head + position % page_size * slot;
  };
  const auto scale_offset = [&](int row, int position, int kv_head) {
    const int64_t run = pages[page_bounds[row] + position / page_size] * kv_heads + kv_head;
    return run * 2 * page_size + position % page_size;
  };
  const auto key_at = [&](int row, int position, int kv_head, int d) {
    const double scale = scales.empty() ? 1 : scales[scale_offset(row, position, kv_head)];
    return scale * cache.at(offset(row, position, kv_head) + d);
  };
  const auto value_at = [&](int row, int position, int kv_head, int d) {
    const double scale = scales.empty() ? 1 : scales[scale_offset(row, position, kv_head) + page_size];
    return scale * cache.at(offset(row, position, kv_head) + page_size * slot + d);
  };
  for (int row = 0; row < num_rows; row++) {
    const int end = starts[row] + bounds[row + 1] - bounds[row];
    for (int position = window ? std::max(0, starts[row] - window + 1) : 0; position < end; position++) {
      for (int kv_head = 0; kv_head < kv_heads; kv_head++) {
        if (!scales.empty()) {
          scales[scale_offset(row, position, kv_head)] = 0.02f * std::abs(normal());
          scales[scale_offset(row, position, kv_head) + page_size] = 0.02f * std::abs(normal());
        }
        for (int d = 0; d < dim; d++) {
          cache.data[offset(row, position, kv_head) + d] = Numbers<Entry>::as(normal());
          cache.data[offset(row, position, kv_head) + page_size * slot + d] = Numbers<Entry>::as(normal());
        }
      }
    }
  }
  AttentionArgs args{};
  args.queries = queries.data.data();
  args.out = out.data.data();
  args.keys = cache.data.data();
  args.values = cache.data.data() + page_size * slot;
  if (!scales.empty()) {
    args.key_scales = scales.data();
    args.value_scales = scales.data() + page_size;
    args.scale_page_stride = kv_heads * 2 * page_size;
    args.scale_head_stride = 2 * page_size;
    args.scale_slot_stride = 1;
  }
  args.bounds = bounds.data();
  args.starts = starts.data();
  args.pages = pages.data();
  args.page_bounds = page_bounds.data();
  args.query_token_stride = args.out_token_stride = heads * dim;
  args.query_head_stride = args.out_head_stride = dim;
  args.page_stride = page;
  args.kv_head_stride = head;
  args.slot_stride = slot;
  args.num_rows = num_rows;
  args.num_heads = heads;
  args.num_kv_heads = kv_heads;
  args.head_dim = dim;
  args.page_size = page_size;
  args.window = window;
  args.queries_bf16 = sizeof(Query) == 2;
  args.entry = entry_of(sizeof(Entry));
  args.scale = 1 / std::sqrt((float)dim);
  args.soft_cap = whole(0, 1) ? 5.0f : 0.0f;
  const int num_threads = whole(1, 4);
  const attention::Schedule schedule(args, num_threads);
  for (int thread = 0; thread < num_threads; thread++) attention_part(args, schedule, thread);

  for (int row = 0; row < num_rows; row++) {
    for (int token = bounds[row]; token < bounds[row + 1]; token++) {
      const int position = starts[row] + token - bounds[row], first = window ? std::max(0, position - window + 1) : 0;
      for (int h = 0; h < heads; h++) {
        std::vector<double> weights;
        double total = 0;
        for (int key = first; key <= position; key++) {
          double score = 0;
          for (int d = 0; d < dim; d++) {
            score += queries.at(((size_t)token * heads + h) * dim + d) * key_at(row, key, h / group, d);
          }
          score *= args.scale;
          if (args.soft_cap != 0) score = args.soft_cap * std::tanh(score / args.soft_cap);
          weights.push_back(std::exp(score));
          total += weights.back();
        }
        for (int d = 0; d < dim; d++) {
          double right = 0, size = 0;
          for (int key = first; key <= position; key++) {
            const double value = value_at(row, key, h / group, d);
            right += weights[key - first] / total * value;
            size += weights[key - first] / total * std::abs(value);
          }
          const double found = out.at(((size_t)token * heads + h) * dim + d);
          const double bound = (sizeof(Query) == 2 ? size / 128 : 0) + 2e-5 * (1 + size);
          if (!(std::abs(found - right) <= bound)) {
            std::printf("row %d token %d head %d dim %d: %g, not %g\n", row, token, h, d, found, right);
            return 1;
          }
        }
      }
    }
  }
  return 0;
}

}  // namespace

int main() {
  for (int round = 0; round < 10; round++) {
    if (check<float, float>() || check<bf16_t, bf16_t>() || check<float, bf16_t>() || check<bf16_t, float>()) return 1;
    if (check<float, int8_t>() || check<bf16_t, int8_t>()) return 1;
  }
  return 0;
}
