// Fused steps of random small models over memory of exactly their size, with NaN in every slot that nothing was written
// to: what is read or written beyond, the sanitizers see. A batch's bits must not depend on its threads.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "step_head.h"

namespace {

std::mt19937 generator(7);

int whole(int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(generator);
}
bool coin() {
  return whole(0, 1) == 1;
}
std::vector<float> numbers(int64_t count, float middle = 0.0f) {
  std::vector<float> result((size_t)count);
  for (float& number : result) number = middle + 0.3f * std::normal_distribution<float>()(generator);
  return result;
}

/// Memory aligned to 64, with nothing of its own behind its last byte.
struct Bytes {
  explicit Bytes(int64_t size) : data((uint8_t*)aligned_alloc(64, (size_t)(size + 63) / 64 * 64), free) {}
  std::unique_ptr<uint8_t, decltype(&free)> data;
};

/// A random model, and what it points to.
struct Model {
  StepModel model{};
  std::vector<StepLayer> layers;
  std::vector<std::unique_ptr<std::vector<float>>> kept;
  std::vector<std::unique_ptr<std::vector<uint8_t>>> panels;

  const float* keep(std::vector<float> values) {
    kept.push_back(std::make_unique<std::vector<float>>(std::move(values)));
    return kept.back()->data();
  }
  const void* table(int64_t rows) {
    const std::vector<float> values = numbers(rows * model.embed_dim);
    const bool half = model.dtype == STEP_BFLOAT16;
    panels.push_back(std::make_unique<std::vector<uint8_t>>(values.size() * (half ? 2 : 4)));
    step::write_numbers(model, values.data(), (int64_t)values.size(), panels.back()->data());
    return panels.back()->data();
  }
  StepNorm norm(bool there) {
    if (!there) return {nullptr, nullptr};
    return {keep(numbers(model.embed_dim, 1.0f)), coin() ? keep(numbers(model.embed_dim)) : nullptr};
  }

  linear::Linear linear(int64_t outs, int64_t ins, bool gated = false) {
    using linear::Format;
    linear::Linear made{};
    made.format = whole(0, 2) == 0 ? Format::INT8 : model.dtype == STEP_BFLOAT16 ? Format::BF16 : Format::FP32;
    made.gated = gated;
    made.outs = outs;
    made.ins = ins;
    const int64_t count = (outs + linear::PANEL - 1) / linear::PANEL * (gated ? 2 : 1);
    panels.push_back(std::make_unique<std::vector<uint8_t>>((size_t)(count * linear::panel_bytes(made))));
    std::vector<uint8_t>& bytes = *panels.back();
    if (coin()) made.input_scale = keep(numbers(ins, 1.0f));
    if (made.format == Format::INT8) {
      made.activations = coin() ? linear::Numbers::INT8 : (linear::Numbers)model.dtype;
      made.group = made.activations == linear::Numbers::INT8 ? 64 : 0;
      for (uint8_t& byte : bytes) byte = (uint8_t)whole(1, 255);
      made.scales = keep(std::vector<float>((size_t)(count * linear::PANEL), 0.003f));
    } else if (made.format == Format::BF16) {
      made.activations = linear::Numbers::BF16;
      for (size_t i = 0; i < bytes.size() / 2; i++) ((bf16_t*)bytes.data())[i] = isa::to_bf16(numbers(1)[0]);
    } else {
      const std::vector<float> values = numbers((int64_t)bytes.size() / 4);
      memcpy(bytes.data(), values.data(), bytes.size());
    }
    made.panels = bytes.data();
    if (coin()) made.bias = keep(numbers(outs * (gated ? 2 : 1)));
    return made;
  }

  Model() {
    model.dtype = coin() ? STEP_BFLOAT16 : STEP_FLOAT32;
    model.embed_dim = whole(1, 90);
    model.vocab_size = whole(1, 120);
    model.num_layers = 2;
    model.norm_kind = coin() ? NORM_LAYER : NORM_RMS;
    model.page_size = whole(1, 20);
    model.cache_entry = coin() ? entries::INT8 : model.dtype == STEP_BFLOAT16 ? entries::BF16 : entries::FLOAT32;
    model.eps = 1e-5;
    model.embedding_scale = 1.5;
    model.logit_scale = 0.5;
    model.logit_soft_cap = coin() ? 5.0 : 0.0;
    model.embed = table(model.vocab_size);
    model.positions = coin() ? table(200) : nullptr;
    model.norm = norm(true);
    model.head = linear(model.vocab_size, model.embed_dim);
    for (int i = 0; i < 2; i++) layers.push_back(layer());
    model.layers = layers.data();
  }

  StepLayer layer() {
    StepLayer made{};
    made.num_kv_heads = whole(1, 3);
    made.num_heads = made.num_kv_heads * whole(1, 3);
    made.head_dim = whole(1, 40);
    made.parallel = coin();
    const bool before = made.parallel || coin();
    made.attention_norm = norm(before);
    made.mlp_norm = norm(before && !made.parallel);
    made.attention_post_norm = norm(!before || coin());
    made.mlp_post_norm = norm(!before || coin());
    made.qk_norm = whole(0, 2);
    if (made.qk_norm != QK_NORM_NONE) {
      const bool all = made.qk_norm == QK_NORM_ALL;
      made.q_norm = keep(numbers(made.head_dim * (all ? made.num_heads : 1), 1.0f));
      made.k_norm = keep(numbers(made.head_dim * (all ? made.num_kv_heads : 1), 1.0f));
    }
    made.rotary = whole(0, (int)made.head_dim / 2) * 2;
    if (made.rotary > 0) {
      made.cos = keep(numbers(200 * made.rotary / 2));
      made.sin = keep(numbers(200 * made.rotary / 2));
    }
    const int64_t width = made.num_heads * made.head_dim, ffn = whole(1, 110);
    made.qkv = linear(width + 2 * made.num_kv_heads * made.head_dim, model.embed_dim);
    made.out = linear(model.embed_dim, width);
    made.up = linear(ffn, model.embed_dim, coin());
    made.down = linear(model.embed_dim, ffn);
    made.window = coin() ? whole(1, 30) : 0;
    made.activation = whole(0, 1);
    made.scale = 0.3;
    made.soft_cap = coin() ? 2.0 : 0.0;
    made.residual_scale = coin() ? 0.7 : 1.0;
    return made;
  }
};

/// Three prompts over scattered pages.
struct Batch {
  StepBatch batch{};
  std::vector<int64_t> ids, positions, slots;
  std::vector<int32_t> bounds{0}, starts, pages, page_bounds{0};
  int64_t num_pages = 0;

  explicit Batch(const StepModel& model) {
    std::vector<int> lengths = {whole(1, 3), whole(1, 100), whole(1, 20)};
    for (int length : lengths) num_pages += (length + model.page_size - 1) / model.page_size;
    int32_t next = (int32_t)num_pages;
    for (int length : lengths) {
      const size_t first = pages.size();
      for (int64_t i = 0; i < length; i += model.page_size) pages.push_back(--next);
      for (int64_t i = 0; i < length; i++) {
        ids.push_back(whole(0, (int)model.vocab_size - 1));
        positions.push_back(i);
        slots.push_back(pages[first + (size_t)(i / model.page_size)] * model.page_size + i % model.page_size);
      }
      starts.push_back(0);
      bounds.push_back((int32_t)ids.size());
      page_bounds.push_back((int32_t)pages.size());
    }
    batch.num_tokens = (int64_t)ids.size();
    batch.num_rows = (int64_t)lengths.size();
  }
};

/// Exit where the likeliest ids of tokens are not those of their logits (T, V).
void expect_likeliest(const StepModel& model, const std::vector<float>& hidden, const std::vector<int64_t>& rows,
                      const std::vector<float>& logits, int num_threads) {
  const auto num_rows = (int64_t)rows.size();
  for (const int64_t num_ids : {model.vocab_size, (model.vocab_size + 1) / 2, (int64_t)1}) {
    Bytes memory(step::likeliest_bytes(model, num_rows, num_threads));
    std::vector<int64_t> ids(rows.size());
    std::vector<float> best(rows.size());
    step::likeliest(model, hidden.data(), rows.data(), num_rows, num_ids, ids.data(), best.data(), memory.data.get(),
                    num_threads, nullptr);
    for (size_t row = 0; row < rows.size(); row++) {
      const float* of_row = logits.data() + row * (size_t)model.vocab_size;
      const float* right = std::max_element(of_row, of_row + num_ids);
      if (ids[row] != right - of_row || best[row] != *right) {
        printf("row %zu: likeliest of %d is %d, %g\n", row, (int)num_ids, (int)ids[row], best[row]);
        exit(1);
      }
    }
  }
}

/// The logits of a batch, (T, V).
std::vector<float> logits(const Model& made, Batch& rows, int num_threads) {
  const StepModel& model = made.model;
  std::vector<std::unique_ptr<std::vector<uint8_t>>> tensors;
  std::vector<StepCache> caches;
  for (const StepLayer& layer : made.layers) {
    const int64_t head = model.page_size * layer.head_dim, page = head * layer.num_kv_heads;
    const size_t bytes = (size_t)(rows.num_pages * page * entries::bytes((int32_t)model.cache_entry));
    uint8_t* both[2];
    for (uint8_t*& one : both) {
      tensors.push_back(std::make_unique<std::vector<uint8_t>>(bytes, 0xff));  // NaN in either type
      one = tensors.back()->data();
    }
    float* scales[2] = {nullptr, nullptr};
    const int64_t slots = model.page_size, heads = layer.num_kv_heads;
    if (model.cache_entry == entries::INT8) {
      for (float*& one : scales) {
        tensors.push_back(std::make_unique<std::vector<uint8_t>>((size_t)(rows.num_pages * heads * slots * 4), 0xff));
        one = (float*)tensors.back()->data();
      }
    }
    caches.push_back({both[0], both[1], scales[0], scales[1], page, head, layer.head_dim, heads * slots, slots, 1});
  }
  const int64_t* slots = rows.slots.data();
  const int32_t *pages = rows.pages.data(), *page_bounds = rows.page_bounds.data();
  StepBatch batch = rows.batch;
  batch.ids = rows.ids.data();
  batch.positions = rows.positions.data();
  batch.slots = &slots;
  batch.bounds = rows.bounds.data();
  batch.starts = rows.starts.data();
  batch.pages = &pages;
  batch.page_bounds = &page_bounds;
  batch.caches = caches.data();
  std::vector<float> hidden((size_t)(batch.num_tokens * model.embed_dim), NAN);
  Bytes memory(step::step_bytes(model, batch.num_tokens, num_threads));
  double seconds[step::NUM_PHASES] = {};
  step::run(model, batch, 0, 1, hidden.data(), memory.data.get(), num_threads, seconds);
  batch.ids = nullptr;  // the second layer takes the residual stream up
  step::run(model, batch, 1, 2, hidden.data(), memory.data.get(), num_threads, nullptr);
  std::vector<int64_t> all((size_t)batch.num_tokens);
  for (size_t i = 0; i < all.size(); i++) all[i] = (int64_t)i;
  std::vector<float> found((size_t)(batch.num_tokens * model.vocab_size), NAN);
  Bytes head(step::head_bytes(model, batch.num_tokens));
  step::logits(model, hidden.data(), all.data(), batch.num_tokens, found.data(), head.data.get(), num_threads, nullptr);
  expect_likeliest(model, hidden, all, found, num_threads);
  return found;
}

}  // namespace

int main() {
  for (int round = 0; round < 60; round++) {
    const Model model;
    Batch batch(model.model);
    const std::vector<float> alone = logits(model, batch, 1);
    for (float number : alone) {
      if (!std::isfinite(number)) {
        printf("round %d: a logit is %g\n", round, number);
        return 1;
      }
    }
    for (int num_threads = 2; num_threads <= 3; num_threads++) {
      const std::vector<float> found = logits(model, batch, num_threads);
      if (memcmp(found.data(), alone.data(), alone.size() * sizeof(float)) != 0) {
        printf("round %d: other bits with %d threads\n", round, num_threads);
        return 1;
      }
    }
  }
  return 0;
}
