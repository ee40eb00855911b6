// Fused steps of random small models over memory of exactly their size, with NaN in every slot that nothing was written
// to: what is read or written beyond, the sanitizers see. A token's bits must not depend on the batch's threads, nor on
// which tokens are read besides.
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
      made.rotated = made.activations == linear::Numbers::INT8 && coin();
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

/// What a run over a batch leaves: the residual stream (T, E), and its caches with NaN where nothing was written.
struct Ran {
  std::vector<float> hidden;
  std::vector<std::unique_ptr<std::vector<uint8_t>>> tensors;
};

/// Run both layers, in one range or in two. Of the second only some tokens are read, unless `reads` is null.
Ran run(const Model& made, Batch& rows, const std::vector<int64_t>* reads, bool at_once, int num_threads) {
  const StepModel& model = made.model;
  Ran ran;
  std::vector<StepCache> caches;
  for (const StepLayer& layer : made.layers) {
    const int64_t head = model.page_size * layer.head_dim, page = head * layer.num_kv_heads;
    const size_t bytes = (size_t)(rows.num_pages * page * entries::bytes((int32_t)model.cache_entry));
    uint8_t* both[2];
    for (uint8_t*& one : both) {
      ran.tensors.push_back(std::make_unique<std::vector<uint8_t>>(bytes, 0xff));  // NaN in either type
      one = ran.tensors.back()->data();
    }
    float* scales[2] = {nullptr, nullptr};
    const int64_t slots = model.page_size, heads = layer.num_kv_heads;
    if (model.cache_entry == entries::INT8) {
      for (float*& one : scales) {
        ran.tensors.push_back(std::make_unique<std::vector<uint8_t>>((size_t)(rows.num_pages * heads * slots * 4), 0xff));
        one = (float*)ran.tensors.back()->data();
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
  ran.hidden.assign((size_t)(batch.num_tokens * model.embed_dim), NAN);
  const auto run_layers = [&](int64_t first, int64_t last, double* seconds) {
    Bytes memory(step::step_bytes(model, batch.num_tokens, batch.num_reads, num_threads));
    step::run(model, batch, first, last, ran.hidden.data(), memory.data.get(), num_threads, seconds);
  };
  double seconds[step::NUM_PHASES] = {};
  batch.num_reads = batch.num_tokens;
  if (!at_once) {
    run_layers(0, 1, seconds);
    batch.ids = nullptr;  // the second layer takes the residual stream up
  }
  if (reads != nullptr) {
    batch.reads = reads->data();
    batch.num_reads = (int64_t)reads->size();
  }
  run_layers(at_once ? 0 : 1, 2, at_once ? seconds : nullptr);
  return ran;
}

/// The logits (T, V) of a residual stream.
std::vector<float> logits(const StepModel& model, const std::vector<float>& hidden, int64_t num_tokens, int num_threads) {
  std::vector<int64_t> all((size_t)num_tokens);
  for (size_t i = 0; i < all.size(); i++) all[i] = (int64_t)i;
  std::vector<float> found((size_t)(num_tokens * model.vocab_size), NAN);
  Bytes head(step::head_bytes(model, num_tokens));
  step::logits(model, hidden.data(), all.data(), num_tokens, found.data(), head.data.get(), num_threads, nullptr);
  expect_likeliest(model, hidden, all, found, num_threads);
  return found;
}

/// Tokens to read, ascending: none, one, neighbours of one row or of several, any, all but one, or all.
std::vector<int64_t> some_of(int num_tokens, int kind) {
  int begin = whole(0, num_tokens - 1), end = begin + 1;
  if (kind == 0) end = begin;
  if (kind == 2) end = whole(begin, num_tokens);
  if (kind > 2) begin = 0, end = num_tokens;
  const int odds = whole(1, 8), left = kind == 4 ? whole(0, num_tokens - 1) : -1;
  std::vector<int64_t> some;
  for (int token = begin; token < end; token++) {
    if (token != left && (kind != 3 || whole(0, odds) == 0)) some.push_back(token);
  }
  return some;
}
constexpr int KINDS = 6;

/// Exit where tokens that are read alone, or what the cache holds then, have other bits than where all are read.
void expect_reads(const Model& made, Batch& rows, const Ran& whole_run, int num_threads) {
  const size_t width = (size_t)made.model.embed_dim;
  for (int kind = 0; kind < KINDS; kind++) {
    const std::vector<int64_t> reads = some_of((int)rows.batch.num_tokens, kind);
    const Ran ran = run(made, rows, &reads, coin(), num_threads);
    bool same = true;
    for (const int64_t token : reads) {
      const size_t at = (size_t)token * width;
      same &= memcmp(ran.hidden.data() + at, whole_run.hidden.data() + at, width * sizeof(float)) == 0;
    }
    for (size_t i = 0; i < ran.tensors.size(); i++) same &= *ran.tensors[i] == *whole_run.tensors[i];
    if (!same) {
      printf("other bits where %zu of %d tokens are read, kind %d, with %d threads\n", reads.size(),
             (int)rows.batch.num_tokens, kind, num_threads);
      exit(1);
    }
  }
}

}  // namespace

int main() {
  for (int round = 0; round < 60; round++) {
    const Model model;
    Batch batch(model.model);
    const int64_t num_tokens = batch.batch.num_tokens;
    const Ran ran = run(model, batch, nullptr, false, 1);
    const std::vector<float> alone = logits(model.model, ran.hidden, num_tokens, 1);
    for (float number : alone) {
      if (!std::isfinite(number)) {
        printf("round %d: a logit is %g\n", round, number);
        return 1;
      }
    }
    for (int num_threads = 1; num_threads <= 3; num_threads++) {
      expect_reads(model, batch, ran, num_threads);
      const Ran other = run(model, batch, nullptr, coin(), num_threads);
      const std::vector<float> found = logits(model.model, other.hidden, num_tokens, num_threads);
      if (memcmp(found.data(), alone.data(), alone.size() * sizeof(float)) != 0) {
        printf("round %d: other bits with %d threads\n", round, num_threads);
        return 1;
      }
    }
  }
  return 0;
}
