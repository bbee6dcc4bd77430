//! In place of the exporters that this build does not have: to ask for one is an error.

/// An exporter that there is none of.
macro_rules! absent {
    ($feature:literal, $name:ident, $exporter:literal, $start:ident($($argument:ty),*), { $($body:tt)* }) => {
        #[cfg(not(feature = $feature))]
        pub(crate) enum $name {}

        #[cfg(not(feature = $feature))]
        impl $name {
            pub(crate) fn $start($(_: $argument),*) -> crate::Result<Self> {
                Err(crate::Error::NotBuilt { exporter: $exporter, feature: $feature })
            }

            $($body)*
        }
    };
}

absent!("prometheus", PrometheusServer, "the Prometheus endpoint", start(std::net::SocketAddr), {
    pub(crate) fn recorder(&self) -> metrics::NoopRecorder {
        match *self {}
    }
});

absent!("otlp", OtlpExporter, "OTLP", start(&crate::metrics::Otlp, usize), {
    pub(crate) fn recorder(&self) -> metrics::NoopRecorder {
        match *self {}
    }

    pub(crate) fn span_layer<S: tracing::Subscriber>(&self) -> Box<dyn tracing_subscriber::Layer<S> + Send + Sync> {
        match *self {}
    }

    pub(crate) fn finish(self, _: std::time::Duration) -> crate::Result<()> {
        match self {}
    }
});

absent!("tensorboard", EventFile, "TensorBoard's event files", create(&std::path::Path), {
    pub(crate) fn step(&mut self, _: u64, _: &[crate::metrics::table::Sample]) -> crate::Result<()> {
        match *self {}
    }
});
