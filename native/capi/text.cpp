// Text in and out, facts about files and devices: llama.cpp's own functions behind the C interface.
#include "pair.h"

#include "build-info.h"
#include "json.h"

#if defined(__GNUC__)
#    pragma GCC diagnostic push
#    pragma GCC diagnostic ignored "-Wunused-function" // static functions in headers of the chat code
#endif
#include "chat.h"
#if defined(__GNUC__)
#    pragma GCC diagnostic pop
#endif

#include <algorithm>

namespace {

common_json parse_messages(const char * messages, int32_t n_messages) {
    common_json parsed;
    try {
        parsed = common_json::parse(std::string(messages, n_messages));
    } catch (const std::exception & e) {
        throw failure(DSPINE_ERR_INVALID, std::string("messages are no JSON: ") + e.what());
    }
    require(parsed.is_array() && parsed.size() > 0, "messages must be a JSON array that is not empty");
    return parsed;
}

const common_chat_templates * chat_templates(dspine_pair & pair) {
    if (!pair.templates) {
        try {
            pair.templates = common_chat_templates_init(pair.model_tgt(), "");
            pair.can_think = common_chat_templates_support_enable_thinking(pair.templates.get());
        } catch (const std::exception &) { // its text says nothing at the pin
            pair.templates.reset();
            throw failure(DSPINE_ERR_INVALID, "the chat template of the target cannot be parsed");
        }
    }
    return pair.templates.get();
}

common_chat_params apply(dspine_pair & pair, const common_json & messages, bool add_generation_prompt, int32_t thinking) {
    const common_chat_templates * templates = chat_templates(pair);
    common_chat_templates_inputs inputs;
    inputs.add_generation_prompt = add_generation_prompt;
    inputs.enable_thinking       = thinking < 0 ? pair.can_think : thinking > 0;
    inputs.reasoning_format      = COMMON_REASONING_FORMAT_DEEPSEEK; // as llama-server does when nothing is said
    try {
        inputs.messages = common_chat_msgs_parse_oaicompat(messages);
        return common_chat_templates_apply(templates, inputs);
    } catch (const std::exception & e) {
        throw failure(DSPINE_ERR_INVALID, std::string("the chat template refuses these messages: ") + e.what());
    }
}

} // namespace

dspine_status dspine_tokenize(const dspine_pair * pair, const char * text, int32_t n_text, bool add_special, bool parse_special,
                              int32_t * out, int32_t capacity, int32_t * n_out) {
    return guarded([&] {
        require(pair && text && n_out, "pair, text and n_out must not be NULL");
        require(n_text >= 0, "the length of the text is negative");
        require(llama_vocab_type(pair->vocab()) != LLAMA_VOCAB_TYPE_NONE, "the target has no vocabulary");
        fill(common_tokenize(pair->vocab(), std::string(text, n_text), add_special, parse_special), out, capacity, n_out);
    });
}

dspine_status dspine_token_to_piece(const dspine_pair * pair, int32_t token, bool special, char * out, int32_t capacity,
                                    int32_t * n_out) {
    return guarded([&] {
        require(pair && n_out, "pair and n_out must not be NULL");
        require(llama_vocab_type(pair->vocab()) != LLAMA_VOCAB_TYPE_NONE, "the target has no vocabulary");
        pair->need_token(token);
        fill(common_token_to_piece(pair->vocab(), token, special), out, capacity, n_out);
    });
}

dspine_status dspine_detokenize(const dspine_pair * pair, const int32_t * tokens, int32_t n, bool special, char * out,
                                int32_t capacity, int32_t * n_out) {
    return guarded([&] {
        require(pair && (tokens || n == 0) && n_out, "pair, tokens and n_out must not be NULL");
        require(n >= 0, "the number of tokens is negative");
        require(llama_vocab_type(pair->vocab()) != LLAMA_VOCAB_TYPE_NONE, "the target has no vocabulary");
        std::for_each(tokens, tokens + n, [&](int32_t id) { pair->need_token(id); });
        fill(common_detokenize(pair->vocab(), llama_tokens(tokens, tokens + n), special), out, capacity, n_out);
    });
}

dspine_status dspine_token_is_eog(const dspine_pair * pair, int32_t token, bool * out) {
    return guarded([&] {
        require(pair && out, "pair and out must not be NULL");
        pair->need_token(token);
        *out = llama_vocab_is_eog(pair->vocab(), token);
    });
}

dspine_status dspine_apply_template(dspine_pair * pair, const char * messages, int32_t n_messages, bool add_generation_prompt,
                                    int32_t thinking, char * out, int32_t capacity, int32_t * n_out) {
    return guarded([&] {
        require(pair && messages && n_out, "pair, messages and n_out must not be NULL");
        require(n_messages >= 0, "the length of messages is negative");
        const common_chat_params chat = apply(*pair, parse_messages(messages, n_messages), add_generation_prompt, thinking);
        const common_json answer = {
            { "prompt",    chat.prompt },
            { "stops",     chat.additional_stops },
            { "preserved", chat.preserved_tokens },
        };
        fill(answer.dump(), out, capacity, n_out);
    });
}

dspine_status dspine_model_meta(const dspine_pair * pair, bool of_drafter, const char * key, char * out, int32_t capacity,
                                int32_t * n_out) {
    return guarded([&] {
        require(pair && key && n_out, "pair, key and n_out must not be NULL");
        if (of_drafter) {
            pair->need_drafter();
        }
        const llama_model * model = of_drafter ? llama_get_model(pair->ctx_dft()) : pair->model_tgt();
        const int32_t n = llama_model_meta_val_str(model, key, nullptr, 0);
        require(n >= 0, std::string("the file has no metadata '") + key + "'");
        std::vector<char> value((size_t) n + 1);
        llama_model_meta_val_str(model, key, value.data(), value.size());
        value.pop_back();
        fill(value, out, capacity, n_out);
    });
}

const char * dspine_llama_build(void) { return llama_build_info(); }

const char * dspine_system_info(void) {
    init_backends();
    return llama_print_system_info();
}

int32_t dspine_device_count(void) {
    init_backends();
    return (int32_t) ggml_backend_dev_count();
}

dspine_status dspine_get_device(int32_t index, dspine_device * device) {
    return guarded([&] {
        require(device, "device must not be NULL");
        const int32_t n = dspine_device_count();
        require(index >= 0 && index < n, "device " + std::to_string(index) + " is outside 0.." + std::to_string(n - 1));
        ggml_backend_dev_t dev = ggml_backend_dev_get((size_t) index);
        size_t free = 0, total = 0;
        ggml_backend_dev_memory(dev, &free, &total);
        *device = {};
        device->name        = ggml_backend_dev_name(dev);
        device->description = ggml_backend_dev_description(dev);
        device->backend     = ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev));
        device->free_bytes  = (int64_t) free;
        device->total_bytes = (int64_t) total;
        device->type        = (int32_t) ggml_backend_dev_type(dev);
    });
}
